"""Stability of training: the largest learning rate whose next step lowers the loss."""
