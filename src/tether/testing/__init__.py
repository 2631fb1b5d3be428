"""Tests for protocols and runtimes: conformance kits, simulated faults, and faults of real processes.

`conformance` has the kits that every protocol and every runtime must pass, Tether's own and yours. `swarm` draws
thousands of simulated runs with faults from seeds. `chaos` kills, stops and starves real processes. An author of a
protocol or runtime needs only the kits:

    from tether.testing import check_protocol, check_runtime

    def test_my_protocol(tmp_path):
        check_protocol(MyProtocol(), tmp_path)

    def test_my_runtime(tmp_path):
        check_runtime(lambda workers: MyRuntime(workers), tmp_path)
"""

from tether.testing.conformance import check_messages, check_protocol, check_runtime

__all__ = ["check_messages", "check_protocol", "check_runtime"]
