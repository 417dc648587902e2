"""What a plan is worth where its inputs are wrong or only known roughly."""
