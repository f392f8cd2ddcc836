"""Why a forecast is as it is: two jobs part by part, and what figures of the hardware and assumed fields are worth."""
