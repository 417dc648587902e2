"""What work will take, learned from what earlier work took, and how right this has been."""
