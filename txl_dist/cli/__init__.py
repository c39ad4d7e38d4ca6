"""Commands of the command line.

A command's signature defines its flags and help, and its body is one call without logic.
"""
