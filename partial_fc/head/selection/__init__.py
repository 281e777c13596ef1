"""Which rows take part in a step: sampling, quotas, hard negatives."""
