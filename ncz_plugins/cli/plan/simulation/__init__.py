"""How long collectives take, found by running the schedules of `core.schedules` over a transport that keeps time only.

`fleet` holds the clocks, `transport` and `codec` take the places of real ones, `calls` puts a call together.
"""
