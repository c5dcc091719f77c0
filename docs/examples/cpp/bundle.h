// What a program needs of a bundle beside a runtime: the manifest, pictures, and the way from a photo to windows and from
// scores to a label map. The rules are those of `recipe.protocol`; Python does the same in algm_deploy/pictures/.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// Values of manifest.json by their path, such as "recipe/protocol/window" or "signature/inputs/0/dtype".
class Manifest {
  public:
    explicit Manifest(const std::string &path) {
        std::ifstream file(path, std::ios::binary);
        if (!file) throw std::runtime_error("cannot read " + path);
        text_.assign(std::istreambuf_iterator<char>(file), {});
        value("");
    }
    std::string text(const std::string &path) const {
        auto found = values_.find(path);
        if (found == values_.end()) throw std::runtime_error("the manifest has no " + path);
        return found->second;
    }
    double number(const std::string &path) const { return std::stod(text(path)); }
    double number(const std::string &path, double otherwise) const { return values_.count(path) ? number(path) : otherwise; }

  private:
    std::string text_;
    size_t at_ = 0;
    std::map<std::string, std::string> values_;

    char next() {
        while (std::isspace(static_cast<unsigned char>(text_.at(at_)))) ++at_;
        return text_.at(at_);
    }
    std::string quoted() {
        std::string read;
        for (++at_; text_.at(at_) != '"'; ++at_) {
            if (text_[at_] == '\\') ++at_; // escaped letters stand for themselves: none of the values read here has any
            read += text_.at(at_);
        }
        ++at_;
        return read;
    }
    void value(const std::string &path) {
        const char first = next();
        if (first == '{' || first == '[') {
            ++at_;
            for (int number = 0; next() != '}' && next() != ']'; ++number) {
                const std::string key = first == '{' ? quoted() : std::to_string(number);
                if (first == '{' && next() == ':') ++at_;
                value(path.empty() ? key : path + "/" + key);
                if (next() == ',') ++at_;
            }
            ++at_;
        } else if (first == '"') {
            values_[path] = quoted();
        } else {
            const size_t end = text_.find_first_of(",]} \r\n\t", at_);
            values_[path] = text_.substr(at_, end - at_);
            at_ = end;
        }
    }
};

// Rows of pixels with interleaved channels.
template <typename T> struct Picture {
    int height = 0, width = 0, channels = 0;
    std::vector<T> pixels;
    Picture(int h, int w, int c) : height(h), width(w), channels(c), pixels(static_cast<size_t>(h) * w * c) {}
    T *row(int y) { return pixels.data() + static_cast<size_t>(y) * width * channels; }
    const T *row(int y) const { return pixels.data() + static_cast<size_t>(y) * width * channels; }
};

// A binary PPM, RGB of 8 bits; `djpeg photo.jpg`, `magick photo.jpg photo.ppm` and OpenCV write such files.
inline Picture<uint8_t> readPpm(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    auto number = [&] {
        while (file >> std::ws && file.peek() == '#') file.ignore(1 << 20, '\n');
        int read = 0;
        file >> read;
        return read;
    };
    std::string magic;
    file >> magic;
    const int width = number(), height = number(), most = number();
    file.get();
    if (!file || magic != "P6" || most != 255 || width < 1 || height < 1 || int64_t{width} * height > 50'000'000)
        throw std::runtime_error("expected a binary PPM of 8 bits, of up to 50 megapixels: " + path);
    Picture<uint8_t> photo(height, width, 3);
    if (!file.read(reinterpret_cast<char *>(photo.pixels.data()), static_cast<std::streamsize>(photo.pixels.size())))
        throw std::runtime_error("truncated: " + path);
    return photo;
}

// A binary PGM whose values are the class indices, of 8 bits up to 256 classes, else of 16.
inline void writePgm(const std::string &path, const Picture<int> &labels, int classes) {
    std::ofstream file(path, std::ios::binary);
    file << "P5\n" << labels.width << ' ' << labels.height << '\n' << (classes > 256 ? 65535 : 255) << '\n';
    for (const int label : labels.pixels) {
        if (classes > 256) file.put(static_cast<char>(label >> 8));
        file.put(static_cast<char>(label));
    }
    if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

// One axis of a bilinear resize by half-pixel centres: both neighbours, and the share of the second one. OpenCV 5 computes
// places in float for pixels of 8 bits, else in double. Beyond the border it takes one pixel across, and down a column the
// same pixel twice, which rounds differently.
template <typename Real> struct Taps {
    std::vector<int> left, right;
    std::vector<float> share;
    Taps(int from, int to, bool across) {
        const double scale = static_cast<double>(from) / to;
        for (int i = 0; i < to; ++i) {
            const Real place = static_cast<Real>((i + 0.5) * scale - 0.5);
            const int low = static_cast<int>(std::floor(place));
            const bool outside = low < 0 || low >= from - 1;
            left.push_back(std::clamp(low, 0, from - 1));
            right.push_back(std::clamp(low + 1, 0, from - 1));
            share.push_back(across && outside ? 0.0F : static_cast<float>(place - static_cast<Real>(low)));
        }
    }
};

// Bilinear as OpenCV's INTER_LINEAR on float32, which rounds a product and a sum once.
inline Picture<float> resized(const Picture<float> &from, int height, int width) {
    if (from.height == height && from.width == width) return from;
    const Taps<double> x(from.width, width, true), y(from.height, height, false);
    const int channels = from.channels;
    Picture<float> to(height, width, channels);
    for (int i = 0; i < height; ++i)
        for (int j = 0; j < width; ++j)
            for (int c = 0; c < channels; ++c) {
                auto across = [&](const float *row) {
                    const float left = row[x.left[j] * channels + c], right = row[x.right[j] * channels + c];
                    return std::fma(right - left, x.share[j], left);
                };
                const float top = across(from.row(y.left[i])), low = across(from.row(y.right[i]));
                to.row(i)[j * channels + c] = std::fma(low - top, y.share[i], top);
            }
    return to;
}

// Bilinear as OpenCV's INTER_LINEAR on uint8: weights of 11 bits, and the mean of four pixels where both sides halve.
inline Picture<uint8_t> resized(const Picture<uint8_t> &from, int height, int width) {
    if (from.height == height && from.width == width) return from;
    const int channels = from.channels;
    Picture<uint8_t> to(height, width, channels);
    if (from.height == 2 * height && from.width == 2 * width) {
        for (int i = 0; i < height; ++i)
            for (int j = 0; j < width * channels; ++j) {
                const int k = (j / channels) * 2 * channels + j % channels;
                const uint8_t *top = from.row(2 * i) + k, *low = from.row(2 * i + 1) + k;
                to.row(i)[j] = static_cast<uint8_t>((top[0] + top[channels] + low[0] + low[channels] + 2) / 4);
            }
        return to;
    }
    const Taps<float> x(from.width, width, true), y(from.height, height, false);
    auto weight = [](float share) { return static_cast<int>(std::lrint(share * 2048.0F)); };
    for (int i = 0; i < height; ++i)
        for (int j = 0; j < width; ++j)
            for (int c = 0; c < channels; ++c) {
                auto across = [&](const uint8_t *row) {
                    return row[x.left[j] * channels + c] * weight(1.0F - x.share[j]) +
                           row[x.right[j] * channels + c] * weight(x.share[j]);
                };
                const int top = (weight(1.0F - y.share[i]) * (across(from.row(y.left[i])) >> 4)) >> 16;
                const int low = (weight(y.share[i]) * (across(from.row(y.right[i])) >> 4)) >> 16;
                to.row(i)[j * channels + c] = static_cast<uint8_t>((top + low + 2) >> 2);
            }
    return to;
}

// How a network takes pictures, from its manifest.
struct Protocol {
    int height, width, window, stride, side, longest, multiple, classes;
    bool labels; // the network gives a label map of a window instead of scores
    explicit Protocol(const Manifest &manifest) {
        auto number = [&](const std::string &path) { return static_cast<int>(manifest.number(path)); };
        height = number("recipe/network/image_size/0"), width = number("recipe/network/image_size/1");
        classes = number("recipe/network/classes");
        window = number("recipe/protocol/window"), stride = number("recipe/protocol/stride");
        side = number("recipe/protocol/short_side");
        multiple = static_cast<int>(manifest.number("recipe/protocol/multiple", 1)); // older bundles tell none
        if (manifest.text("recipe/protocol/resize") == "single") side = std::max(side, window);
        longest = static_cast<int>(std::nearbyint(manifest.number("recipe/protocol/max_ratio") * side));
        labels = manifest.text("recipe/output") == "labels";
    }

    // The resized photo that windows are cut from, 0..255. Fractions come up where a photo is enlarged to the window.
    Picture<float> canvas(const Picture<uint8_t> &photo) const {
        int h = height, w = width; // a network that takes whole frames; else the photo keeps its aspect
        if (height == window && width == window) {
            const double shortest = std::min(photo.height, photo.width), most = std::max(photo.height, photo.width);
            if (most > 8 * shortest) throw std::runtime_error("a picture may be 8 times as long as wide: crop it first");
            const double factor = std::min(longest / most, side / shortest);
            h = static_cast<int>(photo.height * factor + 0.5), w = static_cast<int>(photo.width * factor + 0.5);
        }
        Picture<uint8_t> small = resized(photo, h, w);
        if (height == window && width == window) {
            auto whole = [&](int length) { return (length + multiple - 1) / multiple * multiple; };
            h = whole(h), w = whole(w);
            small = resized(small, h, w);
        }
        Picture<float> found(h, w, 3);
        std::copy(small.pixels.begin(), small.pixels.end(), found.pixels.begin());
        if (height != window || width != window || std::min(h, w) >= window) return found;
        return h < w ? resized(found, window, static_cast<int>(static_cast<double>(w) / h * window))
                     : resized(found, static_cast<int>(static_cast<double>(h) / w * window), window);
    }

    // Where windows begin along a side of the canvas.
    std::vector<int> anchors(int length, int size) const {
        std::vector<int> found;
        for (int at = 0; at < length - size; at += stride) found.push_back(at);
        found.push_back(length - size);
        return found;
    }
};

// The label map of a photo. `network` runs one window: RGB, 3 x height x width, 0..255, in; scores, classes x height x
// width, out, or labels, height x width, where the bundle gives these.
using Network = std::function<std::vector<float>(const std::vector<float> &)>;

inline Picture<int> labelMap(const Picture<uint8_t> &photo, const Protocol &protocol, const Network &network) {
    const Picture<float> canvas = protocol.canvas(photo);
    const int h = protocol.height, w = protocol.width, planes = protocol.labels ? 1 : protocol.classes;
    if (protocol.labels && (canvas.height != h || canvas.width != w))
        throw std::runtime_error("a bundle with labels takes one window: crop the photo, or export with --scores");
    std::vector<Picture<float>> sums(planes, Picture<float>(canvas.height, canvas.width, 1));
    Picture<float> cover(canvas.height, canvas.width, 1);
    for (const int top : protocol.anchors(canvas.height, h))
        for (const int left : protocol.anchors(canvas.width, w)) {
            std::vector<float> window(static_cast<size_t>(3) * h * w);
            for (int c = 0; c < 3; ++c)
                for (int y = 0; y < h; ++y)
                    for (int x = 0; x < w; ++x)
                        window[(static_cast<size_t>(c) * h + y) * w + x] = canvas.row(top + y)[(left + x) * 3 + c];
            const std::vector<float> scores = network(window);
            for (int y = 0; y < h; ++y)
                for (int x = 0; x < w; ++x) {
                    cover.row(top + y)[left + x] += 1;
                    for (int k = 0; k < planes; ++k)
                        sums[k].row(top + y)[left + x] += scores[(static_cast<size_t>(k) * h + y) * w + x];
                }
        }
    Picture<int> labels(photo.height, photo.width, 1);
    if (protocol.labels) { // the nearest, as classes have no mean
        for (int y = 0; y < photo.height; ++y)
            for (int x = 0; x < photo.width; ++x) {
                const int from = std::min(static_cast<int>(std::floor(y * (static_cast<double>(h) / photo.height))), h - 1);
                const int beside = std::min(static_cast<int>(std::floor(x * (static_cast<double>(w) / photo.width))), w - 1);
                labels.row(y)[x] = static_cast<int>(sums[0].row(from)[beside]);
            }
        return labels;
    }
    Picture<float> best(0, 0, 0);
    for (int k = 0; k < planes; ++k) {
        for (size_t i = 0; i < cover.pixels.size(); ++i) sums[k].pixels[i] /= cover.pixels[i];
        const Picture<float> rival = resized(sums[k], photo.height, photo.width);
        if (k == 0) best = rival;
        for (size_t i = 0; i < best.pixels.size(); ++i)
            if (rival.pixels[i] > best.pixels[i]) best.pixels[i] = rival.pixels[i], labels.pixels[i] = k;
    }
    return labels;
}

// The pixels of a window as a network takes them that wants whole numbers: a long photo is enlarged in fractions.
inline std::vector<uint8_t> rounded(const std::vector<float> &window) {
    std::vector<uint8_t> whole(window.size());
    std::transform(window.begin(), window.end(), whole.begin(),
                   [](float pixel) { return static_cast<uint8_t>(std::lrint(std::clamp(pixel, 0.0F, 255.0F))); });
    return whole;
}

// Tokens after each merge, summed over the windows of a photo.
inline void printCounts(const std::vector<int64_t> &counts) {
    std::printf("tokens after each merge:");
    for (const int64_t count : counts) std::printf(" %lld", static_cast<long long>(count));
    std::printf("\n");
}
