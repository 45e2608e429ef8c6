"""Tasks that train a network: fine-tuning, transfer, segmentation and detection, by one loop."""
