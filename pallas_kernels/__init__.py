"""Operations of GLM-5.3-Flash that deserve kernels of their own, usable without `glm5_jax`."""
