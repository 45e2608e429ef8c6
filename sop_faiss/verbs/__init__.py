"""What commands, online scores and the demo call. CONTRIBUTING.md says where a command's verb lives."""
