"""What a network computes: the traced calls, the rules of operations, the program of a certificate."""
