"""txl_dist: pretraining Transformer-XL at scale. Importing the package imports neither torch nor DeepSpeed."""

__version__ = "0.1.0"
