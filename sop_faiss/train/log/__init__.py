"""What a run records: metrics, health, alarms, prototypes, bad samples."""
