"""The laws that hold for every compressor under every schedule, in real processes, as far as it declares them."""
