"""Training programs in plain torch, for other kinds of models than language models. Nothing here imports meshcomm."""
