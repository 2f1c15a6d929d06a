"""Residual blocks with a proved constant: SLL, CPL, LiResNet."""
