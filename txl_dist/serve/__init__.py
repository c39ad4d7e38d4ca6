"""HTTP server for a trained model, with OpenAI's completions API. The server generates many texts at once.

Clients can store memories of texts on the server and name them in later requests. The server imports no training code.
"""
