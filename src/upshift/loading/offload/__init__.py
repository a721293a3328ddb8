"""Run a model whose weights wait on the disk or in host memory until a layer needs them."""
