"""Coefficients of programs and GPUs fitted to published runs, and tested on sources that they have not seen."""
