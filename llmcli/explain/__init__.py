"""One number of a model, derived step by step from the prompt's own values.

A rule for every activation says which inputs it has, its formula in the letters of the seed
documents, how the whole tensor is computed in float64 and how a single number of it is. The
rules share no arithmetic with the decoder (but for the angles of a stretched RoPE): that both
agree is the proof, of a whole way (`derive`) and of every formula alone (`local`).

What they do share with it is the configuration and the weights: a loader that
permutes a matrix, or reads a wrong eps, is not seen here. The parity tests see that.
"""
