// A simulator in C++: simulator HOST:PORT [EPISODES]
//
// It steps 16 environments together and lets a gateway of Juggler act in them. Take it as a
// template: only `Ball` is about the task, which is to keep a ball on a board that can be tilted
// to the left (action 0) or to the right (action 1).

#include <grpcpp/grpcpp.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "juggler/runtime/wire/v1/simulator.grpc.pb.h"

namespace sim = juggler::simulator::v1;
namespace wire = juggler::v1;

constexpr int kEnvironments = 16;
constexpr int kLongest = 200;  // steps of an episode

// -- the task ------------------------------------------------------------------------------------

std::mt19937 rng(std::random_device{}());

float Uniform(float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(rng);
}

struct Ball {
  float x = Uniform(-0.1f, 0.1f);
  float v = Uniform(-0.1f, 0.1f);
  int steps = 0;

  void Step(int64_t action) {
    v += (action == 1 ? 0.05f : -0.05f) + 0.02f * x + Uniform(-0.01f, 0.01f);
    x += 0.2f * v;
    steps += 1;
  }
  bool terminated() const { return std::fabs(x) > 1; }  // it fell off
  bool truncated() const { return !terminated() && steps == kLongest; }
};

// -- what goes over the wire: arrays as little-endian bytes ----------------------------------------

void AppendFloat(std::string* data, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  for (int shift = 0; shift < 32; shift += 8) data->push_back(static_cast<char>(bits >> shift));
}

int64_t ReadInt64(const std::string& data, size_t index) {
  uint64_t bits = 0;
  for (int i = 7; i >= 0; --i) bits = bits << 8 | static_cast<uint8_t>(data[8 * index + i]);
  return static_cast<int64_t>(bits);
}

void Describe(const std::vector<Ball>& balls, sim::NamedTensor* tensor) {
  tensor->set_dtype(wire::DTYPE_FLOAT32);
  tensor->add_shape(balls.size());
  tensor->add_shape(2);
  for (const Ball& ball : balls) {
    AppendFloat(tensor->mutable_data(), ball.x);
    AppendFloat(tensor->mutable_data(), ball.v);
  }
}

// Two numbers without bounds, and one of two actions.
sim::FromSimulator MakeHello() {
  sim::FromSimulator message;
  sim::Hello* hello = message.mutable_hello();
  hello->set_protocol_min(1);
  hello->set_protocol_max(1);
  hello->set_client("balance (C++)");
  hello->set_mode(sim::REMOTE_INFERENCE);
  hello->set_environments(kEnvironments);
  sim::Agent* agent = hello->add_agents();
  agent->set_id("tilter");
  wire::BoxSpace* box = agent->mutable_observation_space()->mutable_box();
  box->add_shape(2);
  box->set_dtype(wire::DTYPE_FLOAT32);
  box->add_low(-std::numeric_limits<double>::infinity());
  box->add_high(std::numeric_limits<double>::infinity());
  wire::DiscreteSpace* discrete = agent->mutable_action_space()->mutable_discrete();
  discrete->set_n(2);
  discrete->set_dtype(wire::DTYPE_INT64);
  return message;
}

// -- the session -----------------------------------------------------------------------------------

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: simulator HOST:PORT [EPISODES]\n";
    return 2;
  }
  const long most = argc > 2 ? std::atol(argv[2]) : std::numeric_limits<long>::max();
  auto stub = sim::Simulator::NewStub(
      grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  // A run that has a token wants to see it in each call.
  if (const char* token = std::getenv("JUGGLER_TOKEN")) {
    context.AddMetadata("authorization", std::string("Bearer ") + token);
  }
  auto stream = stub->Session(&context);
  stream->Write(MakeHello());

  std::vector<Ball> balls(kEnvironments);
  sim::FromSimulator message;
  sim::ToSimulator answer;
  uint64_t seq = 0;
  long played = 0;
  bool good = true;
  while (stream->Read(&answer)) {
    if (answer.has_error()) {
      std::cout << sim::Error::Code_Name(answer.error().code()) << ": "
                << answer.error().message() << std::endl;
      good = answer.error().code() == sim::Error::ENDED;
      continue;
    }
    if (answer.has_notice()) {
      std::cout << answer.notice().text() << std::endl;
      continue;
    }
    message.Clear();
    sim::Rows* rows = message.mutable_steps()->add_agents();
    if (answer.has_actions()) {  // else it is the welcome, and nothing came before
      const std::string& actions = answer.actions().agents(0).actions(0).data();
      std::vector<Ball> cut;
      for (int i = 0; i < kEnvironments; ++i) {
        Ball& ball = balls[i];
        ball.Step(ReadInt64(actions, i));
        rows->add_rewards(1);
        rows->add_terminated(ball.terminated());
        rows->add_truncated(ball.truncated());
        if (ball.truncated()) {  // the gateway wants to know how it looked in the end
          rows->add_final_rows(i);
          cut.push_back(ball);
        }
        if (ball.terminated() || ball.truncated()) {
          if (++played % 100 == 0) {
            std::cout << "episode " << played << ": " << ball.steps << " steps" << std::endl;
          }
          ball = Ball();
        }
      }
      if (!cut.empty()) Describe(cut, rows->add_final_observations());
    }
    if (played >= most) {
      std::cout << "played " << played << " episodes" << std::endl;
      message.Clear();
      message.mutable_goodbye();
      stream->Write(message);
      stream->WritesDone();
      continue;
    }
    Describe(balls, rows->add_observations());
    message.mutable_steps()->set_seq(++seq);
    stream->Write(message);
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) std::cerr << status.error_message() << std::endl;
  return good && status.ok() ? 0 : 1;
}
