"""How each op is evaluated, slowly and obviously: imports nothing of `ops` or the decoder."""
