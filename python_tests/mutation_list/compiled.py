"""Mutations of csrc/. Each compiles one file."""

from mutation_list.mutation import Mutation

OVERLAP = "parallel/test_overlap_is_real.py"

COMPILED = (
    Mutation(
        "scheduler_synchronous",
        "csrc/scheduler.cpp",
        "  ++started_;\n  last_.push_back(",
        "  if (counted.is_cpu()) ticket->work_->wait();\n  ++started_;\n  last_.push_back(",
        (OVERLAP,),
        "The C++ scheduler waits for every collective when it starts it.",
    ),
    Mutation(
        "scheduler_drops_wait",
        "csrc/scheduler.cpp",
        "        wait_on_host(*ticket->work_);\n",
        "        (void)ticket;\n",
        (OVERLAP,),
        "The C++ scheduler does not wait for a collective on the CPU.",
    ),
    Mutation(
        "scheduler_totals_of_last_ticket",
        "csrc/scheduler.cpp",
        "  totals.bytes += record.bytes;\n",
        "  totals.bytes = record.bytes;\n",
        ("execution/test_scheduler.py",),
        "The bytes of a label are those of its last collective.",
    ),
    Mutation(
        "scheduler_link_time_counted_twice",
        "csrc/scheduler.cpp",
        "std::max(0.0, record.finished - std::max(record.issued, link_free_from_))",
        "record.finished - record.issued",
        ("execution/test_scheduler.py",),
        "Time of two collectives in flight counts twice.",
    ),
    Mutation(
        "halt_does_not_stop_a_wait",
        "csrc/scheduler.cpp",
        "    if (state_ != State::running) stop(halting, name);  // zeros may have been summed here\n",
        "",
        ("parallel/test_failure.py",),
        "A rank computes on with the zeros that a failed rank sent.",
    ),
    Mutation(
        "halt_keeps_tickets",
        "csrc/halt.cpp",
        "  for (const auto& ticket : in_flight_) ticket->given_up_ = true;\n",
        "",
        ("execution/test_scheduler.py",),
        "A collective from before a failure can be waited for after it.",
    ),
    Mutation(
        "linear_bias_on_every_rank",
        "csrc/linear.cpp",
        "    matmul_into(part, x.narrow(0, from, to - from), weight, std::nullopt);\n",
        "    matmul_into(part, x.narrow(0, from, to - from), weight, bias);\n",
        ("parallel/test_linear.py",),
        "The bias of a row-parallel linear is added on every rank and after the sum.",
    ),
    Mutation(
        "linear_chunks_drop_remainder",
        "csrc/linear.cpp",
        "  return {total * k / n, total * (k + 1) / n};\n",
        "  return {total / n * k, total / n * (k + 1)};\n",
        ("parallel/test_linear.py",),
        "Rows that do not divide by the number of chunks are not computed.",
    ),
    Mutation(
        "linear_chunks_wait_at_once",
        "csrc/linear.cpp",
        "    tickets.push_back(scheduler.all_reduce(part, label));\n  }\n  meanwhile();\n",
        "    tickets.push_back(scheduler.all_reduce(part, label));\n    scheduler.wait(tickets.back());\n"
        "    tickets.back() = scheduler.all_reduce(y.new_zeros({0}), label);\n  }\n  meanwhile();\n",
        (OVERLAP,),
        "A chunked linear waits for every chunk before it computes the next.",
    ),
    Mutation(
        "gradient_of_sub_batch_halved",
        "csrc/pieces.cpp",
        "    sum->add_(gradient);\n",
        "    sum->add_(gradient, 0.5);\n",
        ("parallel/test_stack.py::test_group_of_one", "execution/test_piece.py"),
        "Gradients of the second sub-batch count half.",
    ),
    Mutation(
        "deferred_gradient_of_last_sub_batch_alone",
        "csrc/pieces.cpp",
        "    sum->addmm_(rows.t(), columns);\n",
        "    at::mm_out(*sum, rows.t(), columns);\n",
        ("execution/test_weight_gradient.py",),
        "A deferred weight gradient is that of its last matmul, not the sum.",
    ),
    Mutation(
        "norm_without_eps",
        "csrc/norm_cpu.cpp",
        "std::sqrt(squares / e.n + e.eps)",
        "std::sqrt(squares / e.n)",
        ("kernels/test_norm.py",),
        "The fused norm on the CPU ignores eps.",
    ),
)
