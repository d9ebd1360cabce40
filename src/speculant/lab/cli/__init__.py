"""The laboratory's commands: one file a command. Nothing here imports torch before a command runs."""
