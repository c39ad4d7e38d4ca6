"""The network. It imports torch and `config.schema`, and knows nothing of data, ranks or engines."""
