"""Transformer-XL network as torch modules.

This package imports torch and `config.schema`. It does not import the packages that read data, start ranks or train.
"""
