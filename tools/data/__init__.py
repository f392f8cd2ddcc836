"""Tables and coefficients that ship with meshcast, made from published and measured runs: made by hand, committed."""
