"""Try the best plans for seconds each, keep the results, and correct later predictions with them."""
