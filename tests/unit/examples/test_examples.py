"""The examples' data, model and slow link: deterministic real text, and a model that never looks ahead."""

import argparse
import os
import socket
from pathlib import Path

import network
import pytest
import torch
from data import Corpus, standard_library_files
from gpt import GPT, GPTConfig
from network import can_limit_connections, limit_connections

SMALL = GPTConfig(context=16, layers=2, heads=2, width=32)


@pytest.fixture(scope="module")
def corpus():
    return Corpus(max_bytes=1_000_000)


def batch(corpus, **changed):
    return corpus.batch(4, 32, **{"seed": 0, "step": 0, "rank": 0, **changed})


class TestData:
    def test_files_are_the_standard_library_without_tests_or_packages(self):
        files = standard_library_files()
        assert Path(argparse.__file__) in files
        assert Path(torch.__file__) not in files
        assert files == sorted(set(files))
        assert not any("site-packages" in file.parts or "test" in file.parts for file in files)

    def test_the_same_text_every_time(self, corpus):
        again = Corpus(max_bytes=1_000_000)
        assert torch.equal(corpus.train, again.train)
        assert torch.equal(corpus.validation, again.validation)

    def test_the_cap_holds_and_both_parts_have_text(self, corpus):
        assert len(corpus.train) + len(corpus.validation) <= 1_000_000
        assert len(corpus.train) > len(corpus.validation) > 1_000

    def test_tokens_are_bytes_of_the_text_and_targets_are_one_further(self, corpus):
        tokens, targets = batch(corpus)
        assert tokens.shape == targets.shape == (4, 32)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        text = bytes(corpus.train.tolist())
        for row in tokens:
            assert bytes(row.tolist()) in text

    def test_a_batch_depends_on_seed_step_and_rank_only(self, corpus):
        assert torch.equal(batch(corpus)[0], batch(corpus)[0])
        for changed in ({"seed": 1}, {"step": 1}, {"rank": 1}):
            assert not torch.equal(batch(corpus)[0], batch(corpus, **changed)[0])

    def test_validation_batches_are_always_the_same(self, corpus):
        first, second = (list(corpus.validation_batches(4, 32, count=3)) for _ in range(2))
        assert len(first) == 3
        for (tokens, targets), (tokens_again, targets_again) in zip(first, second):
            assert tokens.shape == targets.shape == (4, 32)
            assert torch.equal(tokens, tokens_again) and torch.equal(targets, targets_again)


class TestModel:
    def setup_method(self):
        torch.manual_seed(0)
        self.model = GPT(SMALL)
        self.tokens = torch.randint(SMALL.vocabulary, (3, SMALL.context))

    def test_shapes(self):
        assert self.model(self.tokens).shape == (3, SMALL.context, SMALL.vocabulary)
        assert self.model(self.tokens[:, :5]).shape == (3, 5, SMALL.vocabulary)
        assert self.model(self.tokens, self.tokens).shape == ()

    def test_future_tokens_do_not_change_past_logits(self):
        changed = self.tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % SMALL.vocabulary
        before, after = self.model(self.tokens), self.model(changed)
        torch.testing.assert_close(before[:, :9], after[:, :9])
        assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-4

    def test_parameter_count_is_what_the_sizes_say(self):
        c = GPTConfig()
        block = 12 * c.width**2 + 13 * c.width  # four square and two 4x matrices; their biases; two norms
        expected = (c.vocabulary + c.context) * c.width + c.layers * block + 2 * c.width
        assert GPT(c).parameter_count() == expected
        assert 1.5e6 < expected < 2.5e6

    def test_an_untrained_model_knows_nothing(self):
        loss = self.model(self.tokens, torch.randint(SMALL.vocabulary, self.tokens.shape))
        uniform = torch.tensor(float(SMALL.vocabulary)).log()
        torch.testing.assert_close(loss, uniform, rtol=0.02, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_learns_a_batch_by_heart(self, dtype):
        model = self.model.to(dtype)
        assert model(self.tokens).dtype == dtype
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(30):
            loss = model(self.tokens[:, :-1], self.tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
        assert losses[-1] < losses[0] / 2

    def test_too_long_a_sequence_is_refused_with_both_numbers(self):
        with pytest.raises(ValueError, match=f"{SMALL.context + 1} tokens.*{SMALL.context}"):
            self.model(torch.zeros(1, SMALL.context + 1, dtype=torch.int64))

    def test_heads_that_do_not_divide_the_width_are_refused(self):
        with pytest.raises(ValueError, match="width=10.*heads=3"):
            GPTConfig(heads=3, width=10)


class TestSlowLink:
    PACING = 47  # SO_MAX_PACING_RATE

    def test_every_tcp_connection_is_limited_and_nothing_else(self):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as tcp:
            with socket.socket(socket.AF_UNIX) as unix, socket.socket(type=socket.SOCK_DGRAM) as udp:
                sockets = server, tcp, unix, udp
                before = [each.getsockopt(socket.SOL_SOCKET, self.PACING) for each in sockets]
                descriptors = os.listdir("/proc/self/fd")
                limit_connections(8)
                after = [each.getsockopt(socket.SOL_SOCKET, self.PACING) for each in sockets]
                for other in network._connections():  # those of other tests get their speed back
                    with other:
                        other.setsockopt(socket.SOL_SOCKET, self.PACING, -1)
                assert after == [1_000_000, 1_000_000, *before[2:]]
                assert os.listdir("/proc/self/fd") == descriptors, "copies stayed open"

    def test_a_limited_connection_takes_its_time(self):
        assert can_limit_connections()

    def test_a_system_without_limits_is_found_out(self, monkeypatch):
        # An option that the kernel takes, and that limits nothing; a rate at which a limit would take seconds.
        monkeypatch.setattr(network, "_SO_MAX_PACING_RATE", socket.SO_KEEPALIVE)
        monkeypatch.setattr(network, "SLOW_MBITS", 2)
        assert not can_limit_connections()
