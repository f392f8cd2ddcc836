"""Learning from a user's measurements: coefficients of the catalog are the prior, measured rows the likelihood.

``evidence`` states what a section of a calibration is learnt from, ``posterior`` moves its coefficients by as much as
the rows say and judges that on rows held back, ``tables`` learns from tables of kernels and collectives, ``steps`` from
measured steps, ``learn`` recognises files and writes the calibration.
"""
