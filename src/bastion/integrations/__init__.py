"""bastion inside other libraries."""
