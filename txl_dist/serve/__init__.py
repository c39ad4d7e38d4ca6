"""HTTP server for a trained model: OpenAI's completions, memories as handles, many texts at once.

It imports no training code.
"""
