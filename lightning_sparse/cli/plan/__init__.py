"""The command ``lightning-sparse plan``: WILL IT PAY? Profiles a model here, and says what its steps would take."""
