"""The command ``lightning-sparse plan``: WILL IT PAY? Works out r and what a step would take, and runs nothing."""
