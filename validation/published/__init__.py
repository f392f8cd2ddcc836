"""Published training runs, held against their forecasts.

``rows`` reads runs (`Row`), ``mapping`` turns one into a job and says what it had to assume, ``stacks`` knows what each
training program does where a run is silent, ``answer`` forecasts runs on many processes, ``baseline`` is the naive
forecast beside each, ``summary`` adds up. Published tables ship in ``shipped/``.
"""
