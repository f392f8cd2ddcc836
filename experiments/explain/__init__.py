"""Why a forecast is as it is: two jobs part by part, and what each figure of the hardware is worth."""
