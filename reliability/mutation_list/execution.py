"""Mutations of schedules, executor, collectives and tensor-parallel layers."""

from reliability.mutation_list.mutation import Mutation

OVERLAP = "core/blocks/test_overlap_is_real.py"
STACK = "core/blocks/test_stack.py::test_group_of_one"
TENSOR = "core/schedule/test_tensor.py"

EXECUTION = (
    Mutation(
        "executor_waits_at_once",
        "oases/core/execution/executor.py",
        """            for step in steps:
                self.current_op = step.op
                handlers[step.key](step)
            return
""",
        """            steps, done = list(steps), set()
            waits = {step.carried: step for step in steps if step.op.kind == "wait"}
            for step in steps:
                if step.op.kind == "wait" and step.carried in done:
                    continue
                self.current_op = step.op
                handlers[step.key](step)
                if step.is_start and step.carried in waits:
                    handlers[waits[step.carried].key](waits[step.carried])
                    done.add(step.carried)
            return
""",
        (OVERLAP, "core/blocks/test_sim_overlap.py"),
        "The executor waits for every collective right after its start.",
    ),
    Mutation(
        "executor_drops_w_of_first_block",
        "oases/core/blocks/work.py",
        "        else:\n            self.deferred.pop(step.place).compute()\n",
        "        elif step.block:\n            self.deferred.pop(step.place).compute()\n",
        (STACK,),
        "The weight gradients of the first block are never computed.",
    ),
    Mutation(
        "executor_swaps_sub_batches_of_c",
        "oases/core/blocks/work.py",
        "            self._h[block + 1, s] = out\n",
        "            self._h[block + 1, self._cut.number - 1 - s] = out\n",
        (STACK,),
        "The result of op C goes to another sub-batch of the next block.",
    ),
    Mutation(
        "recompute_reads_forward_graph",
        "oases/core/blocks/work.py",
        "        graph = deferred is not None and not again\n",
        "        graph = deferred is not None\n",
        (
            "core/blocks/test_execution.py::test_the_row_parallel_product_is_not_recomputed",
            "core/blocks/test_execution.py::test_recomputation_keeps_block_inputs_alone",
            "core/blocks/test_calls.py::test_recomputed_early_it_keeps_what_no_recomputation_keeps",
        ),
        "A recomputed block keeps the graph of its forward pass, so recomputation saves no memory.",
    ),
    Mutation(
        "residual_counted_twice",
        "oases/core/blocks/work.py",
        "g, residual = g.add_(residual), None",
        "g, residual = g.add_(residual, alpha=2), None",
        (STACK,),
        "The gradient of the residual path is counted twice.",
    ),
    Mutation(
        "whole_attention_runs_twice",
        "oases/autotp/runner.py",
        "if index > 0 and not along and program.behind is not None:",
        "if index > len(layers):",
        ("autotp/test_layer_lists.py::test_what_every_rank_computes_in_full_runs_once",),
        "What every rank computes in full runs before a layer's sum and again after it.",
    ),
    Mutation(
        "replicated_gradient_halved",
        "oases/core/blocks/call.py",
        "else share + whole for share, whole in parts]",
        "else share + whole / 2 for share, whole in parts]",
        (
            "core/blocks/test_stack.py::test_group_of_one",
            "core/blocks/test_execution.py::test_gradients_that_share_memory_stay_apart",
            "distributed/test_replicated.py",
        ),
        "A parameter read before and after the sum gets half of one of its gradients.",
    ),
    Mutation(
        "replicated_gradients_not_summed",
        "oases/core/blocks/call.py",
        "            if held and not (isinstance(",
        "            if not held and not (isinstance(",
        ("core/blocks/test_stack.py::test_gradients_equal_the_unsplit_model",),
        "Gradients of replicated parameters are not summed over the tensor-parallel ranks.",
    ),
    Mutation(
        "wire_drops_wait",
        "oases/core/execution/communication.py",
        "        self.scheduler.wait(flight.ticket)\n",
        "",
        ("core/execution/test_wire.py",),
        "The result of a collective is read without waiting for it.",
    ),
    Mutation(
        "wire_result_not_cast",
        "oases/core/execution/communication.py",
        "lambda: whole.copy_(sent))",
        "lambda: sent)",
        ("core/execution/test_wire.py",),
        "A bfloat16 sum is not cast back to the type of the activations.",
    ),
    Mutation(
        "wire_reduce_scatter_order",
        "oases/core/execution/communication.py",
        "self._size, -1)).movedim(1, 0)",
        "self._size, -1)).movedim(1, 0).flip(0)",
        ("core/execution/test_wire.py",),
        "A reduce-scatter sends the parts of the sequence in reverse rank order.",
    ),
    Mutation(
        "wire_without_timeout",
        "oases/core/execution/communication.py",
        "_timeout_of(group), name",
        "None, name",
        ("core/execution/test_wire_groups.py",),
        "Ranks wait half an hour in a quantised sum for one that stalls, whatever their group's timeout.",
    ),
    Mutation(
        "oases_generated_as_sync",
        "oases/core/schedule/tensor.py",
        'return Schedule("oases", num_blocks, num_sub_batches, tuple(ops()), extent_of(recomputed, num_blocks))',
        "return sync(num_blocks, num_sub_batches, recompute, layer_of)",
        (OVERLAP,),
        "The oases schedule waits for every all-reduce at once.",
    ),
    Mutation(
        "oases_weights_before_the_sum",
        "oases/core/schedule/tensor.py",
        """                yield from started("B", b, s)
                if b > 0:
                    yield Op("W", b, s)
""",
        """                yield Op("B", b, s)
                if b > 0:
                    yield Op("W", b, s)
                yield Op("all_reduce", b, s, "B")
""",
        (TENSOR,),
        "Weight gradients are computed before the all-reduce that they should hide starts.",
    ),
    Mutation(
        "oases_recompute_after_the_wait",
        "oases/core/schedule/tensor.py",
        """                if b in recomputed:
                    yield Op("R", b, s)
                if b < num_blocks - 1:
                    yield Op("wait", b + 1, s, "B")
                yield from started("B", b, s)
                if b > 0:
""",
        """                if b < num_blocks - 1:
                    yield Op("wait", b + 1, s, "B")
                if b in recomputed:
                    yield Op("R", b, s)
                yield from started("B", b, s)
                if b > 0:
""",
        (TENSOR,),
        "Recomputation waits for the gradient, which it does not need.",
    ),
    Mutation(
        "oases_backward_order",
        "oases/core/schedule/tensor.py",
        """        # The sub-batch that finished last goes first, as in the paper's backward pass.
        order = list(reversed(range(num_sub_batches)))
""",
        """        order = list(range(num_sub_batches))
""",
        (TENSOR,),
        "The backward pass begins with the sub-batch that finished first.",
    ),
    Mutation(
        "sequence_parallel_gathers_early",
        "oases/core/schedule/sequence.py",
        "        hidden_before = (len(heavy) + 1) // 2\n",
        "        hidden_before = len(heavy)\n",
        ("core/schedule/test_sequence.py",),
        "The all-gather of sequence parallelism is hidden by nothing.",
    ),
    Mutation(
        "pipeline_more_in_flight",
        "oases/core/schedule/pipeline.py",
        "    ahead = min(many, 2 * (num_stages - 1 - stage) + (chunks - 1) * num_stages)\n",
        "    ahead = min(many, 2 * (num_stages - stage) + (chunks - 1) * num_stages)\n",
        ("core/schedule/test_pipeline.py",),
        "The interleaved pipeline keeps two micro-batches more in flight than it needs.",
    ),
    Mutation(
        "v_has_no_turn",
        "oases/plans/pipelines.py",
        '    back = placement == "v" and part // num_stages % 2 == 1\n',
        "    back = False\n",
        ("simulator/test_simulate.py::test_parts_on_the_way_back_send_the_other_way",),
        "The second parts of a V queue their messages behind those of the first parts, which go the other way.",
    ),
    Mutation(
        "v_defers_too_much",
        "oases/core/schedule/pipeline.py",
        'repeat("Fv Bv Wv F^ B^ W^", ahead)',
        'repeat("Fv Bv F^ B^ Wv W^", ahead)',
        ("core/schedule/test_pipeline.py::test_zb_v_takes_less_time_than_zb_h1_at_the_memory_of_its_first_stage",),
        "ZB-V computes weight gradients later than it could, and holds activations for longer.",
    ),
    Mutation(
        "experts_sent_exposed",
        "oases/plans/expert_schedules.py",
        "    ops = [\n        *forward(),\n",
        '    ops = [\n        *_forward(num_blocks, lambda b: (*_exposed("share", b), *_exposed("join", b))),\n',
        ("core/schedule/test_expert_schedules.py",),
        "Replica parameters of block_wise are sent right before they are needed.",
    ),
    Mutation(
        "pending_gather_of_next_unit_dropped",
        "oases/core/execution/gathering.py",
        "                self._units[following].gather_ahead()\n",
        "                pass\n",
        ("distributed/test_fsdp.py",),
        "FSDP gathers a block's weights only when they are needed.",
    ),
    Mutation(
        "fsdp_gathers_wrong_unit_ahead",
        "oases/core/execution/gathering.py",
        "            for following in self._order[:1]:\n",
        "            for following in self._order[-1:]:\n",
        ("distributed/test_fsdp.py",),
        "FSDP gathers the last block ahead instead of the next.",
    ),
    Mutation(
        "fsdp_bucket_halved",
        "oases/distributed/sharded_gradients.py",
        ".div_(self.unit.group.size()).split",
        ".div_(2 * self.unit.group.size()).split",
        ("distributed/test_fsdp.py",),
        "Gradients of FSDP are half of the average.",
    ),
    Mutation(
        "averaging_divides_by_wrong_number",
        "oases/distributed/gradient_averaging.py",
        "bucket.put(flat.div_(self._scheduler.size), ",
        "bucket.put(flat.div_(len(self.buckets)), ",
        ("distributed/test_gradient_averaging.py",),
        "Averaged gradients are divided by the number of buckets.",
    ),
    Mutation(
        "averaging_sends_at_the_end",
        "oases/distributed/gradient_averaging.py",
        "                bucket.missing.discard(id(parameter))\n                lane.send()\n",
        "                bucket.missing.discard(id(parameter))\n",
        ("distributed/test_gradient_averaging.py",),
        "Gradients are averaged after the backward pass, hidden by nothing.",
    ),
    Mutation(
        "clip_counts_replicated_per_rank",
        "oases/distributed/gradient_clipping.py",
        "alike[summed, copies, gradient.device, gradient.dtype].append(gradient)",
        "alike[True, copies, gradient.device, gradient.dtype].append(gradient)",
        ("distributed/test_gradient_clipping.py",),
        "A replicated gradient counts once per rank in the norm.",
    ),
    Mutation(
        "message_lanes_not_connected",
        "oases/distributed/messages.py",
        "        lane.name = group_name(group)\n",
        "        lane.name = group_name(group)\n        return\n",
        ("virtual_device/test_virtual_pipeline.py",),
        "Ranks of a lane are not connected before their first message.",
    ),
    Mutation(
        "clip_counts_copies_of_shards",
        "oases/distributed/gradient_clipping.py",
        "alike[summed, copies, gradient.device, gradient.dtype].append(gradient)",
        "alike[summed, 1, gradient.device, gradient.dtype].append(gradient)",
        ("distributed/test_gradient_clipping.py",),
        "A shard with data-parallel replicas counts several times in the norm.",
    ),
    Mutation(
        "dropout_masks_reused",
        "oases/layers/dropout.py",
        'f"{draws.key} mask {draws.count}{own}"',
        'f"{draws.key} mask{own}"',
        ("core/blocks/test_randomness.py",),
        "Two dropouts of one op draw the same mask.",
    ),
    Mutation(
        "dropout_same_for_sub_batches",
        "oases/core/blocks/randomness.py",
        "text = repr((*self._key, place, number, sub_batch, 0 if shared",
        "text = repr((*self._key, place, number, 0 if shared",
        ("core/blocks/test_randomness.py",),
        "All sub-batches of a block draw the same random numbers.",
    ),
    Mutation(
        "recompute_draws_anew",
        "oases/core/blocks/randomness.py",
        """            return function()
        return self._isolated(method, block, sub_batch, extent(sub_batch), function)

    def _isolated""",
        """            return function()
        return function()

    def _isolated""",
        ("core/blocks/test_randomness.py",),
        "Recomputation draws other random numbers than the forward pass.",
    ),
    Mutation(
        "dropout_same_on_all_ranks",
        "oases/core/blocks/randomness.py",
        "sub_batch, 0 if shared else self._rank, self._first_sample))",
        "sub_batch, 0, self._first_sample))",
        ("core/blocks/test_randomness.py",),
        "Tensor-parallel ranks draw the same masks for different features.",
    ),
    Mutation(
        "embedding_off_by_one",
        "oases/layers/embedding.py",
        "    mine = (tokens >= first) & (tokens < last)\n",
        "    mine = (tokens > first) & (tokens < last)\n",
        ("layers/test_embedding.py",),
        "The first row of each rank's part of the vocabulary is left out.",
    ),
    Mutation(
        "failure_not_told",
        "oases/core/execution/failure.py",
        'json.loads(self._store.compare_set("failure", "", json.dumps(asdict(failure))))',
        "asdict(failure)",
        ("core/blocks/test_failure.py",),
        "Other ranks are not told of a failure.",
    ),
    Mutation(
        "message_header_order",
        "oases/distributed/messages.py",
        "numbers += [_DTYPES.index(dtype), len(shape), *shape]",
        "numbers += [len(shape), _DTYPES.index(dtype), *shape]",
        ("distributed/test_pipeline_run.py::test_messages_arrive_whole_and_in_order",),
        "The header of a pipeline message is read in another order than written.",
    ),
    Mutation(
        "message_wrong_part",
        "oases/distributed/messages.py",
        "0, self._mesh.rank % lane.degree * size, size",
        "0, 0, size",
        ("distributed/test_pipeline_run.py::test_messages_arrive_whole_and_in_order",),
        "Every tensor-parallel rank of a stage sends the first part.",
    ),
    Mutation(
        "message_to_wrong_peer",
        "oases/distributed/mesh.py",
        "return self.members_of(stage)[self.rank]\n",
        "return self.members_of(stage)[-1 - self.rank]\n",
        ("distributed/test_pipeline_run.py::test_messages_arrive_whole_and_in_order",),
        "Tensor-parallel ranks exchange messages with another rank of the next stage.",
    ),
    Mutation(
        "exchange_waits_for_tokens_at_once",
        "oases/plans/expert_schedules.py",
        "        if 0 < now <= len(order):\n            s = order[now - 1]\n",
        "        if now < len(order):\n            s = order[now]\n",
        ("core/schedule/test_exchange.py::test_an_all_to_all_is_hidden_under_other_sub_batches",),
        "The experts of a sub-batch run right behind its router, so nothing hides the way of its tokens.",
    ),
    Mutation(
        "causal_attention_forgets_gradients_of_earlier_keys",
        "oases/core/blocks/attention.py",
        "            sums[call] = gradient if held is None else held.add_(gradient)\n",
        "            sums[call] = gradient if held is None else held\n",
        ("core/blocks/test_attention.py::test_it_is_that_of_the_whole_sequence",),
        "Keys of a sample's first tokens get the gradient of one later sub-batch instead of all.",
    ),
)
