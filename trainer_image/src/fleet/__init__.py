"""Parameter-server and collective training for PyTorch, with the semantics of PaddlePaddle Fleet."""
