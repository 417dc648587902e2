"""What operators see and do: explanations, snapshots, reload, the console."""
