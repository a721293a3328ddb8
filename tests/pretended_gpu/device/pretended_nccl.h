// NCCL that is not there: a backend for tensors of pretended devices, which gloo exchanges as tensors of the CPU over the same bytes.
//
// It keeps NCCL's rules: tensors lie on a device and are contiguous, each rank has a device of its own, tags of messages mean
// nothing, and averages multiply before they sum.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// DistributedDataParallel asks for times on the device after some steps.
struct PretendedTimer final : c10d::Timer {
  explicit PretendedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto begun = getTimestamp(start), ended = getTimestamp(end);
    if (!begun || !ended) return std::nullopt;
    return *ended - *begun;
  }
};
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendedTimer)
}

struct PretendedNccl final : c10d::Backend {
  PretendedNccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override { gloo_->abort(); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto twins = checked_twins(tensors);
    return gloo_->broadcast(twins, options);
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto twins = checked_twins(tensors);
    auto summing = options;
    summing.reduceOp = summed(options.reduceOp, tensors.at(0));
    scale(options.reduceOp, twins, getSize());
    return gloo_->allreduce(twins, summing);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto twins = checked_twins(tensors);
    auto summing = options;
    summing.reduceOp = summed(options.reduceOp, tensors.at(0));
    scale(options.reduceOp, twins, getSize());
    return gloo_->allreduce_coalesced(twins, summing);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto twins = checked_twins(tensors);
    auto summing = options;
    summing.reduceOp = summed(options.reduceOp, tensors.at(0));
    scale(options.reduceOp, twins, getSize());
    return gloo_->reduce(twins, summing);
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto of_outputs = checked_twins(outputs);
    auto of_inputs = checked_twins(inputs);
    return gloo_->allgather(of_outputs, of_inputs, options);
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto of_output = checked_twin(output).view(-1);  // NCCL counts numbers, and gloo compares shapes
    auto of_input = checked_twin(input).view(-1);
    return gloo_->_allgather_base(of_output, of_input, options);
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto of_outputs = checked_twins(outputs);
    auto of_inputs = checked_twins(inputs);
    return gloo_->allgather_into_tensor_coalesced(of_outputs, of_inputs, options);
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto of_outputs = checked_twins(outputs);
    auto of_inputs = checked_twins(inputs);
    return gloo_->gather(of_outputs, of_inputs, options);
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto of_outputs = checked_twins(outputs);
    auto of_inputs = checked_twins(inputs);
    return gloo_->scatter(of_outputs, of_inputs, options);
  }
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto of_outputs = checked_twins(outputs);
    auto of_inputs = checked_twins(inputs);
    auto summing = options;
    summing.reduceOp = summed(options.reduceOp, outputs.at(0));
    for (auto& list : of_inputs) list = scaled_copies(options.reduceOp, list);
    return gloo_->reduce_scatter(of_outputs, of_inputs, summing);
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto of_output = checked_twin(output).view(-1);
    auto of_input = scaled_copies(options.reduceOp, {checked_twin(input)})[0].view(-1);
    auto summing = options;
    summing.reduceOp = summed(options.reduceOp, output);
    return gloo_->_reduce_scatter_base(of_output, of_input, summing);
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto of_outputs = checked_twins(outputs);
    auto of_inputs = scaled_copies(options.reduceOp, checked_twins(inputs));
    auto summing = options;
    summing.reduceOp = summed(options.reduceOp, outputs.at(0));
    return gloo_->reduce_scatter_tensor_coalesced(of_outputs, of_inputs, summing);
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions& options) override {
    auto of_output = checked_twin(output);
    auto of_input = checked_twin(input);
    return gloo_->alltoall_base(of_output, of_input, output_sizes, input_sizes, options);
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto of_outputs = checked_twins(outputs);
    auto of_inputs = checked_twins(inputs);
    return gloo_->alltoall(of_outputs, of_inputs, options);
  }
  WorkPointer send(Tensors& tensors, int to, int) override {
    auto twins = checked_twins(tensors, false);
    return gloo_->send(twins, to, 0);
  }
  WorkPointer recv(Tensors& tensors, int from, int) override {
    auto twins = checked_twins(tensors, false);
    return gloo_->recv(twins, from, 0);
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  bool devices_were_compared_ = false;
  int64_t device_ = -1;  // of this rank in this group

  at::Tensor checked_twin(const at::Tensor& tensor, bool is_collective = true) {
    TORCH_CHECK(tensor.is_cuda() && !tensor.is_sparse(), "No backend type associated with device type ", tensor.device(), " (nccl)");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous (nccl)");
    const auto type = tensor.scalar_type();
    TORCH_CHECK(type != at::kShort && type != at::kUInt16 && type != at::kUInt32, "Unconvertible NCCL type ", type);
    check_device(tensor.device().index(), is_collective);
    at::Tensor on_cpu = twin(tensor);
    return on_cpu.element_size() == 1 && type != at::kChar ? on_cpu.view(at::kByte) : on_cpu;
  }
  Tensors checked_twins(const Tensors& tensors, bool is_collective = true) {
    Tensors twins;
    for (const auto& tensor : tensors) twins.push_back(checked_twin(tensor, is_collective));
    return twins;
  }
  std::vector<Tensors> checked_twins(const std::vector<Tensors>& lists) {
    std::vector<Tensors> twins;
    for (const auto& list : lists) twins.push_back(checked_twins(list));
    return twins;
  }

  // Another device has another communicator, which the other ranks would have to make at the same time.
  void check_device(int64_t device, bool is_collective) {
    if (device_ < 0) device_ = device;
    TORCH_CHECK(device == device_, "NCCL hangs: rank ", getRank(), " exchanged on CUDA device ", device_, " before, and now on ", device);
    if (is_collective && !devices_were_compared_) compare_devices(device);
  }

  // NCCL refuses a group in which two ranks of a host use the same device.
  void compare_devices(int64_t device) {
    devices_were_compared_ = true;
    Tensors mine = {at::full({1}, device, at::kLong)};
    std::vector<Tensors> all(1);
    for (int rank = 0; rank < getSize(); ++rank) all[0].push_back(at::empty({1}, at::kLong));
    gloo_->allgather(all, mine, c10d::AllgatherOptions())->wait();
    std::map<int64_t, int> rank_of;
    for (int rank = 0; rank < getSize(); ++rank) {
      auto [other, is_new] = rank_of.emplace(all[0][rank].item<int64_t>(), rank);
      TORCH_CHECK(is_new, "NCCL error: invalid usage. Duplicate GPU detected : rank ", other->second, " and rank ", rank,
                  " both on CUDA device ", other->first);
    }
  }

  static c10d::ReduceOp summed(const c10d::ReduceOp& operation, const at::Tensor& tensor) {
    if (operation.op_ == c10d::ReduceOp::SUM && tensor.scalar_type() == at::kBool) return c10d::ReduceOp::MAX;
    if (operation.op_ != c10d::ReduceOp::AVG && operation.op_ != c10d::ReduceOp::PREMUL_SUM) return operation;
    TORCH_CHECK(tensor.is_floating_point(), "the pretended NCCL averages floating-point numbers only");
    return c10d::ReduceOp::SUM;
  }
  static void scale(const c10d::ReduceOp& operation, Tensors& twins, int size) {
    for (auto& tensor : twins) {
      if (operation.op_ == c10d::ReduceOp::AVG) tensor.mul_(1.0 / size);
      if (operation.op_ != c10d::ReduceOp::PREMUL_SUM) continue;
      auto* factor = static_cast<c10d::PreMulSumSupplement*>(operation.supplement_.get());
      if (factor->tensor_factor.defined()) tensor.mul_(twin(factor->tensor_factor));
      else tensor.mul_(factor->double_factor);
    }
  }
  Tensors scaled_copies(const c10d::ReduceOp& operation, Tensors twins) {
    if (operation.op_ != c10d::ReduceOp::AVG && operation.op_ != c10d::ReduceOp::PREMUL_SUM) return twins;
    for (auto& tensor : twins) tensor = tensor.clone();
    scale(operation, twins, getSize());
    return twins;
  }
};
