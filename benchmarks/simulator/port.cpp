// The kernel of src/dovetail/simulator/kernel.py in C++, without slots and recording: the yardstick
// for numba. Same rules, same structures, memory included; must give the same bits.
//
//   port INPUT OUTPUT REPEATS     see run.py for the layout of both files
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

using i8 = int8_t;
using i32 = int32_t;
using i64 = int64_t;
using f64 = double;

template <class T> std::vector<T> read(FILE *file) {
    i64 count;
    if (fread(&count, 8, 1, file) != 1) exit(2);
    std::vector<T> values(count);
    if (count && fread(values.data(), sizeof(T), count, file) != (size_t)count) exit(2);
    return values;
}

struct Simulation {
    i64 ops, tensors, devices, channels, host;
    std::vector<i32> sources, source_homes;
    std::vector<i8> is_source;
    std::vector<i32> output_offsets, input_offsets, input_tensors, producers;
    std::vector<i64> tensor_bytes;
    std::vector<i32> bases;
    std::vector<i8> is_output;
    std::vector<i32> waits;
    std::vector<i64> fresh_bytes;
    std::vector<i32> consumer_offsets, consumers, control_offsets, control_targets;
    std::vector<f64> compute_seconds;
    std::vector<i32> link_of, link_sources, link_channels;
    std::vector<f64> link_latencies, link_bandwidths;
    std::vector<i8> relayed;
    std::vector<i32> carriers, carried;

    std::vector<i32> placed, homes, roots, pending, holds, ready, ready_sizes, running;
    std::vector<i64> stamps, memory, peaks;
    std::vector<f64> event_times, queue_ready;
    std::vector<i32> event_lanes, queue_units, queue_destinations, queue_links, queue_next,
        queue_previous, heads, tails, touched;
    std::vector<i8> is_touched;
    i64 events, queued, touched_count, sent, done;
    f64 now;
    static constexpr i32 HOST = -1, EVERYWHERE = -2;

    explicit Simulation(FILE *file) {
        auto sizes = read<i64>(file);
        ops = sizes[0], tensors = sizes[1], devices = sizes[2], channels = sizes[3], host = sizes[4];
        sources = read<i32>(file), source_homes = read<i32>(file), is_source = read<i8>(file);
        output_offsets = read<i32>(file), input_offsets = read<i32>(file);
        input_tensors = read<i32>(file), producers = read<i32>(file);
        tensor_bytes = read<i64>(file), bases = read<i32>(file), is_output = read<i8>(file);
        waits = read<i32>(file), fresh_bytes = read<i64>(file);
        consumer_offsets = read<i32>(file), consumers = read<i32>(file);
        control_offsets = read<i32>(file), control_targets = read<i32>(file);
        compute_seconds = read<f64>(file), link_of = read<i32>(file);
        link_sources = read<i32>(file), link_channels = read<i32>(file);
        link_latencies = read<f64>(file), link_bandwidths = read<f64>(file);
        relayed = read<i8>(file), carriers = read<i32>(file), carried = read<i32>(file);
        i64 lanes = devices + channels, transfers = 0;
        for (i64 t = 0; t < tensors; t++)
            transfers += most_sends(consumer_offsets[t + 1] - consumer_offsets[t]);
        for (i64 o = 0; o < ops; o++)
            transfers += most_sends(control_offsets[o + 1] - control_offsets[o]);
        placed.resize(ops), homes.resize(tensors), roots.resize(tensors), pending.resize(ops);
        holds.resize(tensors * devices), ready.resize(devices * ops), ready_sizes.resize(devices);
        running.resize(lanes), stamps.resize(devices), memory.resize(devices);
        peaks.resize(devices), event_times.resize(lanes), event_lanes.resize(lanes);
        queue_ready.resize(transfers), queue_units.resize(transfers);
        queue_destinations.resize(transfers), queue_links.resize(transfers);
        queue_next.resize(transfers), queue_previous.resize(transfers);
        heads.resize(channels), tails.resize(channels), touched.resize(lanes);
        is_touched.resize(lanes);
    }

    i64 most_sends(i64 fan_out) const {
        return (fan_out < devices - 1 ? fan_out : devices - 1) + (fan_out > 0);
    }

    f64 run(const i32 *placement) {
        for (i64 op = 0; op < ops; op++)
            if (!is_source[op]) placed[op] = placement[op];
        for (size_t i = 0; i < sources.size(); i++) {
            i32 home = source_homes[i];
            placed[sources[i]] = home == HOST ? (i32)host : home >= 0 ? placement[home] : home;
        }
        pending = waits;
        std::fill(holds.begin(), holds.end(), 0);
        std::fill(stamps.begin(), stamps.end(), -1);
        std::fill(ready_sizes.begin(), ready_sizes.end(), 0);
        std::fill(running.begin(), running.end(), -1);
        std::fill(heads.begin(), heads.end(), -1);
        std::fill(tails.begin(), tails.end(), -1);
        std::fill(is_touched.begin(), is_touched.end(), 0);
        std::fill(memory.begin(), memory.end(), 0);
        events = queued = touched_count = sent = 0;
        for (i64 t = 0; t < tensors; t++) homes[t] = placed[producers[t]];
        now = 0.0;
        place_sources();
        start_all();
        while (events > 0) {
            now = event_times[0];
            while (events > 0 && event_times[0] == now) finish(pop_event());
            start_all();
        }
        return done == ops ? now : std::numeric_limits<f64>::infinity();
    }

    void place_sources() {
        for (i32 op : sources)
            for (i32 t = output_offsets[op]; t < output_offsets[op + 1]; t++) {
                if (placed[op] != EVERYWHERE) {
                    memory[placed[op]] += tensor_bytes[t];
                    continue;
                }
                sent++;
                for (i32 k = consumer_offsets[t]; k < consumer_offsets[t + 1]; k++) {
                    i32 device = placed[consumers[k]];
                    if (stamps[device] != sent) {
                        stamps[device] = sent;
                        memory[device] += tensor_bytes[t];
                    }
                }
            }
        peaks = memory;
        for (i64 op = 0; op < ops; op++)
            if (pending[op] == 0 && !is_source[op]) make_ready(op, placed[op]);
        for (size_t i = 0; i < sources.size(); i++) {
            i32 op = sources[i];
            for (i32 t = output_offsets[op]; t < output_offsets[op + 1]; t++) {
                if (homes[t] == EVERYWHERE) {
                    roots[t] = -1;
                    continue;
                }
                i32 users = deliver(t, homes[t]);
                hold_output(t, homes[t], users, source_homes[i] != HOST);
            }
        }
        done = sources.size();
    }

    void finish(i32 lane) {
        i32 entry = running[lane];
        running[lane] = -1;
        touch(lane);
        if (lane >= devices) return finish_transfer(entry);
        i32 op = entry;
        done++;
        for (i32 t = output_offsets[op]; t < output_offsets[op + 1]; t++) {
            i32 users = deliver(t, lane);
            hold_output(t, lane, users, false);
        }
        sent++;
        for (i32 k = control_offsets[op]; k < control_offsets[op + 1]; k++) {
            i32 after = control_targets[k], there = placed[after];
            if (there == lane) arrive(after, lane);
            else if (stamps[there] != sent) send(tensors + op, lane, there);
        }
        for (i32 i = input_offsets[op]; i < input_offsets[op + 1]; i++)
            release(input_tensors[i], lane);
    }

    void finish_transfer(i32 entry) {
        i32 unit = queue_units[entry], device = queue_destinations[entry];
        if (unit >= tensors) {
            i32 op = unit - tensors;
            sent++;
            for (i32 k = control_offsets[op]; k < control_offsets[op + 1]; k++) {
                i32 after = control_targets[k];
                if (placed[after] == device) arrive(after, device);
                else if (device == host) send_on(unit, placed[op], placed[after]);
            }
            return;
        }
        release(unit, link_sources[queue_links[entry]]);
        i32 users = 0;
        for (i32 k = consumer_offsets[unit]; k < consumer_offsets[unit + 1]; k++)
            if (placed[consumers[k]] == device) {
                users++;
                arrive(consumers[k], device);
            }
        if (device == host && relayed[homes[unit]]) {
            sent++;
            for (i32 k = consumer_offsets[unit]; k < consumer_offsets[unit + 1]; k++)
                users += send_on(unit, homes[unit], placed[consumers[k]]);
        }
        holds[(i64)unit * devices + device] = users;
    }

    i32 deliver(i32 tensor, i32 device) {
        i32 users = 0;
        sent++;
        for (i32 k = consumer_offsets[tensor]; k < consumer_offsets[tensor + 1]; k++) {
            i32 op = consumers[k], there = placed[op];
            if (there == device) {
                users++;
                arrive(op, device);
            } else if (stamps[there] != sent) users += send(tensor, device, there);
        }
        return users;
    }

    i32 send(i32 unit, i32 source, i32 destination) {
        stamps[destination] = sent;
        i32 link = link_of[source * devices + destination];
        if (link < 0) {
            destination = host;
            if (stamps[destination] == sent) return 0;
            stamps[destination] = sent;
            link = link_of[source * devices + destination];
        }
        enqueue(unit, destination, link);
        return 1;
    }

    i32 send_on(i32 unit, i32 home, i32 destination) {
        if (destination == home || link_of[home * devices + destination] >= 0) return 0;
        if (stamps[destination] == sent) return 0;
        stamps[destination] = sent;
        enqueue(unit, destination, link_of[host * devices + destination]);
        return 1;
    }

    void enqueue(i32 unit, i32 destination, i32 link) {
        i32 fresh = queued++, channel = link_channels[link];
        queue_ready[fresh] = now, queue_units[fresh] = unit;
        queue_destinations[fresh] = destination, queue_links[fresh] = link;
        i32 before = tails[channel], after = -1;
        while (before >= 0 && queue_ready[before] == now) {
            i32 other = queue_units[before];
            if (other < unit || (other == unit && queue_destinations[before] < destination)) break;
            after = before;
            before = queue_previous[before];
        }
        queue_previous[fresh] = before, queue_next[fresh] = after;
        (before < 0 ? heads[channel] : queue_next[before]) = fresh;
        (after < 0 ? tails[channel] : queue_previous[after]) = fresh;
        touch(devices + channel);
    }

    void hold_output(i32 tensor, i32 device, i32 users, bool pinned) {
        i32 base = bases[tensor], root = tensor;
        if (pinned) root = -1;
        else if (base >= 0)
            root = homes[base] == EVERYWHERE ? -1 : homes[base] == device ? roots[base] : base;
        roots[tensor] = root;
        if (root < 0) return;
        i32 &left = holds[(i64)root * devices + device];
        left += users + is_output[tensor];
        if (left == 0) memory[device] -= tensor_bytes[root];
    }

    void release(i32 tensor, i32 device) {
        i32 home = homes[tensor];
        if (home == EVERYWHERE) return;
        i32 root = home == device ? roots[tensor] : tensor;
        if (root >= 0 && --holds[(i64)root * devices + device] == 0)
            memory[device] -= tensor_bytes[root];
    }

    void arrive(i32 op, i32 device) {
        if (--pending[op] == 0) make_ready(op, device);
    }

    void make_ready(i32 op, i32 device) {
        touch(device);
        i32 *heap = &ready[(i64)device * ops], i = ready_sizes[device]++;
        while (i > 0) {
            i32 parent = (i - 1) >> 1;
            if (heap[parent] < op) break;
            heap[i] = heap[parent];
            i = parent;
        }
        heap[i] = op;
    }

    i32 pop_ready(i32 device) {
        i32 *heap = &ready[(i64)device * ops], size = --ready_sizes[device];
        i32 least = heap[0], last = heap[size], i = 0, child = 1;
        while (child < size) {
            if (child + 1 < size && heap[child + 1] < heap[child]) child++;
            if (last < heap[child]) break;
            heap[i] = heap[child];
            i = child;
            child = 2 * i + 1;
        }
        heap[i] = last;
        return least;
    }

    void push_event(f64 time, i32 lane) {
        i64 i = events++;
        while (i > 0) {
            i64 parent = (i - 1) >> 1;
            if (event_times[parent] <= time) break;
            event_times[i] = event_times[parent], event_lanes[i] = event_lanes[parent];
            i = parent;
        }
        event_times[i] = time, event_lanes[i] = lane;
    }

    i32 pop_event() {
        i64 size = --events, i = 0, child = 1;
        i32 first = event_lanes[0], lane = event_lanes[size];
        f64 time = event_times[size];
        while (child < size) {
            if (child + 1 < size && event_times[child + 1] < event_times[child]) child++;
            if (time <= event_times[child]) break;
            event_times[i] = event_times[child], event_lanes[i] = event_lanes[child];
            i = child;
            child = 2 * i + 1;
        }
        event_times[i] = time, event_lanes[i] = lane;
        return first;
    }

    void touch(i32 lane) {
        if (is_touched[lane]) return;
        is_touched[lane] = 1;
        touched[touched_count++] = lane;
    }

    void start_all() {
        for (i64 i = 0; i < touched_count; i++) {
            i32 lane = touched[i];
            is_touched[lane] = 0;
            if (running[lane] >= 0) continue;
            i32 channel = lane >= devices ? lane - (i32)devices : carried[lane];
            if (lane >= devices) lane = carriers[channel];
            if (channel >= 0) {
                i32 send = devices + channel;
                if ((lane >= 0 && running[lane] >= 0) || running[send] >= 0) continue;
                if (heads[channel] >= 0) {
                    start_transfer(send);
                    continue;
                }
            }
            if (lane >= 0 && ready_sizes[lane] > 0) {
                i32 op = pop_ready(lane);
                running[lane] = op;
                allocate(lane, fresh_bytes[op]);
                push_event(now + compute_seconds[op * devices + lane], lane);
            }
        }
        touched_count = 0;
    }

    void start_transfer(i32 lane) {
        i32 channel = lane - devices, entry = heads[channel];
        i32 after = queue_next[entry];
        heads[channel] = after;
        (after < 0 ? tails[channel] : queue_previous[after]) = -1;
        i32 unit = queue_units[entry], link = queue_links[entry];
        f64 seconds = link_latencies[link];
        if (unit < tensors) {
            seconds += tensor_bytes[unit] / link_bandwidths[link];
            allocate(queue_destinations[entry], tensor_bytes[unit]);
        }
        running[lane] = entry;
        push_event(now + seconds, lane);
    }

    void allocate(i32 device, i64 size_bytes) {
        memory[device] += size_bytes;
        if (memory[device] > peaks[device]) peaks[device] = memory[device];
    }
};

int main(int count, char **arguments) {
    if (count != 4) return 2;
    FILE *file = fopen(arguments[1], "rb");
    if (!file) return 2;
    Simulation simulation(file);
    auto placements = read<i32>(file);
    fclose(file);
    i64 rows = placements.size() / simulation.ops;
    FILE *out = fopen(arguments[2], "wb");
    if (!out) return 2;
    for (int repeat = 0; repeat < atoi(arguments[3]); repeat++) {
        auto start = std::chrono::steady_clock::now();
        std::vector<f64> results;
        for (i64 row = 0; row < rows; row++) {
            results.push_back(simulation.run(&placements[row * simulation.ops]));
            for (i64 peak : simulation.peaks) results.push_back((f64)peak);
        }
        std::chrono::duration<f64> seconds = std::chrono::steady_clock::now() - start;
        f64 taken = seconds.count();
        fwrite(&taken, 8, 1, out);
        fwrite(results.data(), 8, results.size(), out);
    }
    fclose(out);
}
