"""What a round costs on this machine."""
