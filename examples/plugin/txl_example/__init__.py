"""An example of a plugin for txl_dist: one module for each kind of thing that can be added (docs/extending.md).

`run.plugins = ["txl_example.training"]` names what a training needs; `txl prepare --plugins txl_example.text` names
what a preparation needs.
"""
