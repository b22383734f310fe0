"""Simulation of collectives: runs the schedules of `core.schedules` with a codec and a transport that only keep time.

calls      one collective from beginning to end
fleet      clocks of all ranks and their links
programs   the same for schedules in which ranks do different things
transport  a transport that sends nothing and keeps time
codec      a codec that codes nothing and keeps time
costs      what coding, messages and calls cost a rank
sizes      bits per value, from coding a sample with the real kernels
"""
