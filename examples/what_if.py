"""Try a cluster before you buy it: the same task on 8 simulated machines, priced as ResNet-110, on two networks."""

import tether
from tether.tasks.digits import Digits

for link in ("1gbit", "10gbit"):
    cluster = tether.Sim(workers=8, link=link, step_seconds=0.095, model_bytes="7MiB")
    for protocol in (tether.Server(sync="hard"), tether.Averaging()):
        figures = tether.run(Digits(), protocol, cluster, epochs=10).figures
        print(
            f"{link:>6} {protocol.name:<10} {figures['seconds']:6.1f} s  computing {figures['utilization']['mean']:.0%}"
        )
