"""Reference evaluation of each op: slow and simple, without imports from `ops` or the decoder."""
