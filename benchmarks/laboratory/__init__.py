"""Laboratory: collectives over slow links on one machine, beside libraries that users would pick instead.

    sudo .venv/bin/python -m benchmarks.laboratory.perf all_reduce --link 100mbit,1gbit --peers all
    sudo .venv/bin/python -m benchmarks.laboratory.start --link 1gbit --ranks 2 .venv/bin/ncz tune --output tuned.json

perf        `ncz perf` over links of any rate, with more contenders
start       starts any command on ranks behind links, as torchrun does without links
link        network namespaces, joined by links of a given rate
launch      starts the ranks of a measurement in these namespaces
rendezvous  server at which Horovod's ranks meet
rank        the part of one rank of `perf`
measure     measurement that checks that bytes cross the links
plot        the picture of `perf`
peers/      contenders that `ncz perf` lacks
"""
