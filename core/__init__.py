"""What every layer rests on: errors, configuration, rank arithmetic, numerics, seeds and genome data."""
