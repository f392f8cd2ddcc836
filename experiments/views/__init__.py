"""What pictures and tables show, without a library that draws them."""
