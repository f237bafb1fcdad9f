// MLPerf's LoadGen asks, getp answers: the scenarios Offline and Server, by the rules of the
// benchmark gpt-oss-120b (temperature 1, top-p 1, at most 10,240 tokens out; LoadGen itself knows
// the others, such as the latencies of Server).
//
//     mlperf --model MODEL --samples FILE --scenario Offline|Server
//            --mode performance|accuracy|verify [--logs DIR] [--qps RATE] [--seconds N]
//            [--max-tokens N]
//
// FILE: the number of samples, then one a line: the seed of its random numbers and the token ids of
// its prompt (examples/make_samples.rs writes such a file). Each sample has a seed of its own, so
// its answer depends on nothing else: verify submits the samples of an accuracy run again, each to
// a batch in which it is alone, and compares the answers with LoadGen's log.
//
// The program succeeds if LoadGen found the run VALID and no error (performance), LoadGen found no
// error (accuracy), or all answers are equal (verify).

#include "getp.h"

#include <loadgen.h>
#include <query_sample_library.h>
#include <system_under_test.h>
#include <test_settings.h>

#include <getopt.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

const char kUsage[] =
    "usage: mlperf --model MODEL --samples FILE --scenario Offline|Server\n"
    "              --mode performance|accuracy|verify [--logs DIR] [--qps RATE] [--seconds N]\n"
    "              [--max-tokens N]\n"
    "  --model       a .bin file or a directory of safetensors\n"
    "  --samples     the number of samples, then one a line: its seed and the ids of its prompt;\n"
    "                the example make_samples writes such a file\n"
    "  --mode        performance: LoadGen measures, and says whether the run is VALID\n"
    "                accuracy:    each sample is answered once, and LoadGen logs the ids\n"
    "                verify:      compares an accuracy run's log with what each gives alone\n"
    "  --logs        where LoadGen's logs are, made if it is not there; default: .\n"
    "  --qps         Server: samples a second that arrive; Offline: those expected, of which\n"
    "                LoadGen issues as many as fill the time; default: 1\n"
    "  --seconds     the least time of a performance run; default: 600, as the rules have it\n"
    "  --max-tokens  the most tokens of an answer; default: 10240, as the rules have it\n"
    "GETP_* variables in the environment are the library's options.\n";

// The benchmark, by the name that it has in LoadGen.
const char kBenchmark[] = "gpt-oss-120b";

struct Options {
    std::string model;
    std::string samples;
    std::string scenario;
    std::string mode;
    std::string logs = ".";
    double qps = 0.0;      // 0: LoadGen's default
    double seconds = 0.0;  // 0: the rules'
    size_t max_tokens = 10240;

    std::string log(const char *name) const { return logs + "/mlperf_log_" + name; }
};

struct Sample {
    uint64_t seed;
    std::vector<int> prompt;
};

// Ids go to LoadGen as the benchmark's scripts read them from its log: little-endian int32.
static_assert(sizeof(int) == 4, "ids are 32 bits wide");

[[noreturn]] void fail(const std::string &why) { throw std::runtime_error(why); }

// The number at the beginning of `text`, which becomes what is behind it.
template <typename Number>
bool take_number(const char **text, Number (*parse)(const char *, char **, int), Number *number) {
    char *end;
    errno = 0;
    *number = parse(*text, &end, 10);
    const bool is_number = std::isdigit(static_cast<unsigned char>(**text)) != 0 && errno == 0;
    *text = end;
    return is_number;
}

std::vector<Sample> read_samples(const std::string &path) {
    std::ifstream file(path);
    std::string line;
    unsigned long long count, seed;
    if (!file) fail(path + ": " + std::strerror(errno) + "; make it with the example make_samples");
    std::getline(file, line);
    const char *text = line.c_str();
    if (!take_number(&text, std::strtoull, &count) || *text != '\0' || count == 0) {
        fail(path + ":1: it is not a number of samples; make the file with make_samples");
    }
    std::vector<Sample> samples;
    while (std::getline(file, line)) {
        const std::string at = path + ":" + std::to_string(samples.size() + 2) + ": ";
        Sample sample;
        text = line.c_str();
        if (!take_number(&text, std::strtoull, &seed)) fail(at + "it does not begin with a seed");
        sample.seed = seed;
        do {
            long id;
            const bool has_space = *text++ == ' ';
            if (!has_space || !take_number(&text, std::strtol, &id) || id > INT32_MAX) {
                fail(at + "behind the seed must be ids, each behind one space");
            }
            sample.prompt.push_back(static_cast<int>(id));
        } while (*text != '\0');
        samples.push_back(std::move(sample));
    }
    if (samples.size() != count) {
        fail(path + " has " + std::to_string(samples.size()) + " samples and not " +
             std::to_string(count) + ", as its first line says; make it again");
    }
    return samples;
}

getp_request request_of(const Sample &sample, size_t max_tokens) {
    getp_request request;
    getp_request_init(&request);
    request.prompt = sample.prompt.data();
    request.prompt_length = sample.prompt.size();
    request.max_tokens = max_tokens;
    // To LoadGen an answer of one token is an error: it divides by the tokens behind the first.
    request.min_tokens = 2;
    request.temperature = 1.0f;
    request.topp = 1.0f;
    request.seed = sample.seed;
    return request;
}

std::unique_ptr<getp_model, decltype(&getp_model_close)> open_model(const Options &options) {
    getp_model *model = getp_model_open(options.model.c_str(), nullptr);
    if (model == nullptr) fail("the model cannot be opened; the line above says why");
    return {model, getp_model_close};
}

// The file of samples. They are few and stay in memory.
class Library final : public mlperf::QuerySampleLibrary {
public:
    Library(std::string name, size_t samples) : name_(std::move(name)), samples_(samples) {}

    const std::string &Name() override { return name_; }
    size_t TotalSampleCount() override { return samples_; }
    size_t PerformanceSampleCount() override { return samples_; }
    void LoadSamplesToRam(const std::vector<mlperf::QuerySampleIndex> &) override {}
    void UnloadSamplesFromRam(const std::vector<mlperf::QuerySampleIndex> &) override {}

private:
    std::string name_;
    size_t samples_;
};

// A model with a batch. LoadGen's samples become requests, and its answers come by callback, not
// from a thread of ours with getp_batch_next: LoadGen's functions wait for nothing and may be
// called on any thread, so another one would only be a hop between a token and LoadGen's clock, and
// would have to be told when to end. The library calls on one thread, which also keeps a sample's
// first token before its end in LoadGen's log; that does not keep the order between threads.
class Getp final : public mlperf::SystemUnderTest {
public:
    Getp(const Options &options, const std::vector<Sample> &samples)
        : name_(std::string("getp ") + getp_version()),
          samples_(samples),
          max_tokens_(options.max_tokens),
          model_(open_model(options)) {
        getp_batch_options batch_options;
        getp_batch_options_init(&batch_options);
        batch_options.on_event = on_event;
        batch_options.context = this;
        batch_ = getp_batch_open(model_.get(), &batch_options);
        if (batch_ == nullptr) fail("the model cannot be run; the line above says why");
    }

    // Closing a batch waits for nothing, closing a model for the callback's return: so the model is
    // closed here, while there is still what the callback uses.
    ~Getp() override {
        getp_batch_close(batch_);
        model_.reset();
    }

    const std::string &Name() override { return name_; }

    void IssueQuery(const std::vector<mlperf::QuerySample> &queries) override {
        for (const mlperf::QuerySample &query : queries) {
            // From here to the request's last event it belongs to the batch, as the request's tag.
            auto answer = std::make_unique<Answer>(Answer{query.id, query.index, {}});
            getp_request request = request_of(samples_[query.index], max_tokens_);
            // The first event is to come with the first token.
            request.tokens_per_event = 1;
            request.tag = reinterpret_cast<uintptr_t>(answer.get());
            if (getp_batch_submit(batch_, &request, nullptr) == GETP_OK) {
                answer.release();
            } else {
                fail_sample(*answer, getp_last_error());
                report_first(*answer);
                report_end(*answer);
            }
        }
    }

    // Requests do not wait here for others to make a batch with.
    void FlushQueries() override {}

    size_t failed() const { return failed_; }

private:
    struct Answer {
        mlperf::ResponseId id;
        mlperf::QuerySampleIndex index;
        std::vector<int> tokens;
    };

    static void on_event(void *context, const getp_event *event) noexcept {
        static_cast<Getp *>(context)->take(*event);
    }

    void take(const getp_event &event) {
        auto *answer = reinterpret_cast<Answer *>(static_cast<uintptr_t>(event.tag));
        const bool is_first = answer->tokens.empty();
        const bool is_last = event.end != GETP_END_NONE;
        answer->tokens.insert(answer->tokens.end(), event.tokens, event.tokens + event.count);
        if (event.status != GETP_OK) fail_sample(*answer, event.why);
        if (is_first) report_first(*answer);
        if (is_last) {
            report_end(*answer);
            delete answer;
        }
    }

    // LoadGen waits for each sample, so one that has failed is reported, too: without tokens, or
    // with those that it had. LoadGen logs an error for it, and the program fails.
    void fail_sample(const Answer &answer, const char *why) {
        if (failed_++ == 0) std::fprintf(stderr, "mlperf: sample %zu: %s\n", answer.index, why);
    }

    // In Offline, LoadGen does not use the time of the first token, but reads it.
    static void report_first(Answer &answer) {
        report(answer, answer.tokens.empty() ? 0 : 1, mlperf::FirstTokenComplete);
    }

    static void report_end(Answer &answer) {
        report(answer, answer.tokens.size(), mlperf::QuerySamplesComplete);
    }

    static void report(Answer &answer, size_t tokens,
                       void (*complete)(mlperf::QuerySampleResponse *, size_t,
                                        const mlperf::ResponseCallback &)) {
        mlperf::QuerySampleResponse response(answer.id,
                                             reinterpret_cast<uintptr_t>(answer.tokens.data()),
                                             tokens * sizeof(int), static_cast<int64_t>(tokens));
        complete(&response, 1, {});
    }

    std::string name_;
    const std::vector<Sample> &samples_;
    size_t max_tokens_;
    std::unique_ptr<getp_model, decltype(&getp_model_close)> model_;
    getp_batch *batch_ = nullptr;
    std::atomic<size_t> failed_{0};
};

mlperf::TestSettings settings_of(const Options &options) {
    mlperf::TestSettings settings;
    settings.scenario =
        options.scenario == "Server" ? mlperf::TestScenario::Server : mlperf::TestScenario::Offline;
    settings.mode = options.mode == "accuracy" ? mlperf::TestMode::AccuracyOnly
                                               : mlperf::TestMode::PerformanceOnly;
    // The rules that LoadGen has in itself, those of 0. With them it records tokens' latencies.
    if (settings.FromConfig("", kBenchmark, options.scenario, 0) != 0 ||
        !settings.use_token_latencies) {
        fail(std::string("this LoadGen does not know ") + kBenchmark + "; build it with setup.sh");
    }
    // They count the samples of MLPerf's own data. Here all of the file are used.
    settings.performance_sample_count_override = 0;
    settings.accuracy_sample_count_override = 0;
    if (options.qps > 0.0) {
        settings.server_target_qps = options.qps;
        settings.offline_expected_qps = options.qps;
    }
    if (options.seconds > 0.0) {
        settings.min_duration_ms = static_cast<uint64_t>(std::ceil(options.seconds * 1000.0));
    }
    return settings;
}

// LoadGen crashes where it cannot write its logs. Opening them also empties them: an older run's
// summary must not be read as this one's.
void open_logs(const Options &options) {
    std::error_code ignored;  // it shows below
    std::filesystem::create_directories(options.logs, ignored);
    for (const char *name : {"summary.txt", "detail.txt", "accuracy.json", "trace.json"}) {
        const std::string path = options.log(name);
        if (!std::ofstream(path)) {
            fail(path + ": " + std::strerror(errno) + "; name another folder by --logs");
        }
    }
}

// Runs LoadGen; false if the run does not count.
bool test(const Options &options, const std::vector<Sample> &samples) {
    const std::string summary = options.log("summary.txt");
    const bool measures = options.mode == "performance";
    mlperf::LogSettings logs;
    logs.log_output.outdir = options.logs;
    logs.log_output.copy_summary_to_stdout = measures;
    logs.enable_trace = false;

    open_logs(options);
    Library library(options.samples, samples.size());
    Getp getp(options, samples);
    mlperf::StartTest(&getp, &library, settings_of(options), logs);

    std::stringstream text;
    text << std::ifstream(summary).rdbuf();
    const auto says = [&](const char *what) { return text.str().find(what) != std::string::npos; };
    const bool has_errors = !says("No errors encountered during test.");
    const bool is_valid = !measures || says("Result is : VALID");
    if (getp.failed() > 0) {
        std::fprintf(stderr, "mlperf: %zu samples have failed; the first one is above\n",
                     getp.failed());
    }
    if (has_errors) {
        std::fprintf(stderr, "mlperf: LoadGen met errors: see %s\n",
                     options.log("detail.txt").c_str());
    }
    if (!is_valid) {
        std::fprintf(stderr, "mlperf: the run is not VALID: see %s\n", summary.c_str());
    }
    return getp.failed() == 0 && !has_errors && is_valid;
}

// What a sample gives in a batch of its own.
std::vector<int> answer_alone(getp_model *model, const Sample &sample, size_t max_tokens) {
    std::unique_ptr<getp_batch, decltype(&getp_batch_close)> batch(getp_batch_open(model, nullptr),
                                                                   getp_batch_close);
    const getp_request request = request_of(sample, max_tokens);
    const getp_event *event = nullptr;
    if (batch == nullptr || getp_batch_submit(batch.get(), &request, nullptr) != GETP_OK ||
        getp_batch_next(batch.get(), -1.0, &event) != GETP_OK) {
        fail("a sample cannot be answered alone; the line above says why");
    }
    // Without tokens_per_event this is the only event.
    std::unique_ptr<const getp_event, decltype(&getp_event_free)> owner(event, getp_event_free);
    if (event->status != GETP_OK) fail(event->why);
    return {event->tokens, event->tokens + event->count};
}

// A field's text in an entry of LoadGen's accuracy log, which has one a line; empty if it is not
// there.
//     { "seq_id" : 0, "qsl_idx" : 5, "data" : "2A000000", ..., "token_count" : 1 },
std::string field(const std::string &entry, const std::string &name) {
    const std::string key = "\"" + name + "\" : ";
    size_t begin = entry.find(key);
    if (begin == std::string::npos) return {};
    begin += key.size();
    if (entry[begin] == '"') ++begin;
    return entry.substr(begin, entry.find_first_of("\", }", begin) - begin);
}

// The entries of an accuracy run's log by sample; each must have one.
std::vector<std::string> read_log(const std::string &path, size_t samples) {
    std::ifstream log(path);
    if (!log) fail(path + ": " + std::strerror(errno) + "; run --mode accuracy first");
    std::vector<std::string> entries(samples);
    for (std::string line; std::getline(log, line);) {
        const std::string text = field(line, "qsl_idx");
        if (text.empty()) continue;  // a bracket
        const size_t index = std::strtoull(text.c_str(), nullptr, 10);
        if (index >= samples) fail(path + " is of another file of samples");
        if (!entries[index].empty()) fail(path + " has two answers to sample " + text);
        entries[index] = line;
    }
    for (size_t i = 0; i < samples; ++i) {
        if (entries[i].empty()) {
            fail(path + " has no answer to sample " + std::to_string(i) +
                 "; run --mode accuracy again");
        }
    }
    return entries;
}

// As LoadGen writes bytes.
std::string hex(const int *ids, size_t count) {
    static const char digits[] = "0123456789ABCDEF";
    std::vector<unsigned char> bytes(count * sizeof *ids);
    if (count > 0) std::memcpy(bytes.data(), ids, bytes.size());
    std::string text;
    for (const unsigned char byte : bytes) text += {digits[byte >> 4], digits[byte & 15]};
    return text;
}

// Compares the answers of an accuracy run with what each sample gives alone. They are asked for in
// the file's order, not in that of the run.
bool verify(const Options &options, const std::vector<Sample> &samples) {
    const std::string path = options.log("accuracy.json");
    const std::vector<std::string> entries = read_log(path, samples.size());
    const auto model = open_model(options);
    size_t equal = 0;
    for (size_t i = 0; i < samples.size(); ++i) {
        const std::vector<int> alone = answer_alone(model.get(), samples[i], options.max_tokens);
        // In Server, LoadGen logs the first token, too.
        const bool is_equal = field(entries[i], "data") == hex(alone.data(), alone.size()) &&
                              field(entries[i], "token_count") == std::to_string(alone.size()) &&
                              (options.scenario != "Server" ||
                               field(entries[i], "token_data") ==
                                   hex(alone.data(), std::min<size_t>(alone.size(), 1)));
        equal += is_equal;
        if (!is_equal && equal == i) {
            std::fprintf(stderr, "mlperf: sample %zu has another answer alone than in %s\n", i,
                         path.c_str());
        }
    }
    std::printf("%zu of %zu answers equal\n", equal, samples.size());
    return equal == samples.size();
}

[[noreturn]] void refuse(const std::string &why) {
    std::fprintf(stderr, "mlperf: %s\n%s", why.c_str(), kUsage);
    std::exit(2);
}

double positive(const char *option, const char *text) {
    char *end;
    const double number = std::strtod(text, &end);
    if (end == text || *end != '\0' || !std::isfinite(number) || number <= 0.0) {
        refuse(std::string(option) + " is " + text + "; use a number above 0");
    }
    return number;
}

Options parse(int argc, char **argv) {
    static const option known[] = {
        {"model", required_argument, nullptr, 'm'},
        {"samples", required_argument, nullptr, 'f'},
        {"scenario", required_argument, nullptr, 's'},
        {"mode", required_argument, nullptr, 'o'},
        {"logs", required_argument, nullptr, 'l'},
        {"qps", required_argument, nullptr, 'q'},
        {"seconds", required_argument, nullptr, 'd'},
        {"max-tokens", required_argument, nullptr, 't'},
        {"help", no_argument, nullptr, 'h'},
        {nullptr, 0, nullptr, 0},
    };
    Options options;
    for (int c; (c = getopt_long(argc, argv, "", known, nullptr)) != -1;) {
        switch (c) {
            case 'm': options.model = optarg; break;
            case 'f': options.samples = optarg; break;
            case 's': options.scenario = optarg; break;
            case 'o': options.mode = optarg; break;
            case 'l': options.logs = optarg; break;
            case 'q': options.qps = positive("--qps", optarg); break;
            case 'd': options.seconds = positive("--seconds", optarg); break;
            case 't': {
                const char *text = optarg;
                unsigned long long tokens;
                if (!take_number(&text, std::strtoull, &tokens) || *text != '\0' || tokens < 2) {
                    refuse(std::string("--max-tokens is ") + optarg + "; use 2 or more");
                }
                options.max_tokens = tokens;
                break;
            }
            case 'h': std::fputs(kUsage, stdout); std::exit(0);
            default: std::fputs(kUsage, stderr); std::exit(2);
        }
    }
    if (optind < argc) refuse(std::string(argv[optind]) + " is not an option");
    if (options.model.empty()) refuse("--model is missing");
    if (options.samples.empty()) refuse("--samples is missing");
    if (options.scenario != "Offline" && options.scenario != "Server") {
        refuse("--scenario must be Offline or Server");
    }
    if (options.mode != "performance" && options.mode != "accuracy" && options.mode != "verify") {
        refuse("--mode must be performance, accuracy or verify");
    }
    return options;
}

}  // namespace

int main(int argc, char **argv) {
    const Options options = parse(argc, argv);
    try {
        const std::vector<Sample> samples = read_samples(options.samples);
        const bool passed =
            options.mode == "verify" ? verify(options, samples) : test(options, samples);
        return passed ? EXIT_SUCCESS : EXIT_FAILURE;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "mlperf: %s\n", error.what());
        return EXIT_FAILURE;
    }
}
