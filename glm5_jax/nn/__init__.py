"""The layers of GLM-5.3-Flash as Flax NNX modules: one file per idea of the paper."""
