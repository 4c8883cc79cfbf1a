package chain

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// readAll returns all entries of r, the rightmost first.
func readAll(r Reader) []string {
	var entries []string
	for {
		entry, ok := r.Next()
		if !ok {
			return entries
		}
		entries = append(entries, entry)
	}
}

// rejoin undoes readAll: the lines, with the line ends as commas.
func rejoin(entries []string) string {
	leftToRight := slices.Clone(entries)
	slices.Reverse(leftToRight)
	return strings.Join(leftToRight, ",")
}

// listModel is what a Reader of a list must yield, the obvious way.
func listModel(lines []string) []string {
	if len(lines) == 0 {
		return nil
	}
	entries := strings.Split(strings.Join(lines, ","), ",")
	slices.Reverse(entries)
	return entries
}

func TestListReader(t *testing.T) {
	for _, test := range []struct {
		why   string
		lines []string
		want  []string
	}{
		{"no header, no entries", nil, nil},
		{"an empty line holds one entry, and that is empty", []string{""}, []string{""}},
		{"one entry", []string{"a"}, []string{"a"}},
		{"the rightmost first", []string{"a,b,c"}, []string{"c", "b", "a"}},
		{"white space is the caller's to judge", []string{"a, b ,\tc"}, []string{"\tc", " b ", "a"}},
		{"the last line is the rightmost", []string{"a,b", "c"}, []string{"c", "b", "a"}},
		{"a trailing comma ends in an empty entry", []string{"a,"}, []string{"", "a"}},
		{"a leading comma begins with one", []string{",a"}, []string{"a", ""}},
		{"empty entries in the middle keep their places", []string{"a,,,b"}, []string{"b", "", "", "a"}},
		{"only commas", []string{",,"}, []string{"", "", ""}},
		{"an empty line between two others keeps its place", []string{"a", "", "b"}, []string{"b", "", "a"}},
		{"an empty last line is the rightmost entry", []string{"a", ""}, []string{"", "a"}},
		{"quotes mean nothing in a list", []string{`"a,b"`}, []string{`b"`, `"a`}},
		{"nor do backslashes", []string{`a\,b`}, []string{"b", `a\`}},
		{"nor NUL", []string{"a\x00,b"}, []string{"b", "a\x00"}},
		{"the comma of another script separates nothing", []string{"a，b"}, []string{"a，b"}},
	} {
		if got := readAll(FromList(test.lines)); !slices.Equal(got, test.want) {
			t.Errorf("%s: entries of %q = %q, want %q", test.why, test.lines, got, test.want)
		}
	}
}

func TestListReaderLikeModel(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		lines := make([]string, random.IntN(4))
		for i := range lines {
			lines[i] = randomText(random, `,a "\`, random.IntN(10))
		}
		if got, want := readAll(FromList(lines)), listModel(lines); !slices.Equal(got, want) {
			t.Fatalf("entries of %q = %q, want %q", lines, got, want)
		}
	}
}

func randomText(random *rand.Rand, alphabet string, length int) string {
	text := make([]byte, length)
	for i := range text {
		text[i] = alphabet[random.IntN(len(alphabet))]
	}
	return string(text)
}

func TestReaderIsAValue(t *testing.T) {
	for name, from := range readers {
		var zero Reader
		if entry, ok := zero.Next(); ok {
			t.Errorf("the zero value yields %q", entry)
		}

		lines := []string{"a,b", "c"}
		r := from(lines)
		r.Next()
		mark := r
		if got, want := readAll(r), []string{"b", "a"}; !slices.Equal(got, want) {
			t.Errorf("%s: after one entry = %q, want %q", name, got, want)
		}
		if got, want := readAll(mark), []string{"b", "a"}; !slices.Equal(got, want) {
			t.Errorf("%s: a copy reads on from %q, want %q", name, got, want)
		}
		if want := []string{"a,b", "c"}; !slices.Equal(lines, want) {
			t.Errorf("%s: the lines have become %q", name, lines)
		}

		r = from(lines)
		for range 3 {
			r.Next()
		}
		for range 3 {
			if entry, ok := r.Next(); ok || entry != "" {
				t.Errorf("%s: behind the leftmost entry: %q, %t", name, entry, ok)
			}
		}
	}
}

var readers = map[string]func([]string) Reader{
	"list":     FromList,
	"elements": FromForwarded,
}

// hostileLines are lines of about the given size that are expensive to a reader
// which looks back, counts again, or collects.
func hostileLines(size int) map[string]string {
	repeat := func(text string) string { return strings.Repeat(text, size/len(text)) }
	return map[string]string{
		"addresses":          repeat("198.51.100.77, "),
		"elements":           repeat(`for="[2001:db8::1]:4711";by=_x, `),
		"commas":             repeat(","),
		"quotes":             repeat(`"`),
		"backslashes":        repeat(`\`),
		"escaped quotes":     repeat(`\"`),
		"quoted backslashes": `"` + repeat(`\`) + `"`,
		"quoted commas":      repeat(`","`),
		"quotes and commas":  repeat(`",`),
		"runs":               repeat(`"` + strings.Repeat(`\`, 61) + `",`),
		"open quote":         `for=6.6.6.6;by="` + repeat(", for=6.6.6.6"),
		"closing quote":      repeat("for=6.6.6.6, ") + `"`,
		"semicolons":         repeat(";"),
		"parameters":         repeat("a=b;"),
		"white space":        repeat(" \t"),
		"one entry":          repeat("1"),
		"one zone":           "fe80::1%" + repeat("e"),
		"colons":             repeat(":"),
		"dots":               repeat("."),
		"brackets":           repeat("["),
	}
}

// Reading all of a megabyte, entry by entry, takes milliseconds if each byte is
// looked at a bounded number of times, and far longer than a test may run if not.
func TestHostileMegabyte(t *testing.T) {
	for name, line := range hostileLines(1 << 20) {
		for syntax, from := range readers {
			bytes, entries := 0, 0
			r := from([]string{line, "", line})
			for entry, ok := r.Next(); ok; entry, ok = r.Next() {
				entries++
				bytes += len(entry)
				consume(entry)
			}
			if commas, want := entries-1, len(line+",,"+line); bytes+commas != want {
				t.Errorf("%s of %s: %d bytes and %d commas do not make up the lines, of %d bytes", syntax, name, bytes, commas, want)
			}
		}
	}
}

// consume makes of an entry all that can be made of it.
func consume(entry string) {
	ParseAddr(entry)
	ParseNode(entry)
	if node, ok := ForwardedFor(entry); ok {
		ParseNode(node)
	}
}

func TestReadingAllocatesNothing(t *testing.T) {
	lines := hostileLines(16 << 10)
	lines["empty"] = ""
	for name, line := range lines {
		header := []string{line, line}
		for syntax, from := range readers {
			allocs := testing.AllocsPerRun(10, func() {
				r := from(header)
				for entry, ok := r.Next(); ok; entry, ok = r.Next() {
					consume(entry)
				}
			})
			if allocs != 0 {
				t.Errorf("%s of %s: %v allocations", syntax, name, allocs)
			}
		}
	}
}

func FuzzListReader(f *testing.F) {
	for _, seed := range []string{
		"", ",", "\n", "a,", ",a", "6.6.6.6, 203.0.113.7", "6.6.6.6\n203.0.113.7", `"a,b"`, "a\\,b", "\xff,\x00",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		lines := strings.Split(text, "\n")
		entries := readAll(FromList(lines))
		if got, want := rejoin(entries), strings.ReplaceAll(text, "\n", ","); got != want {
			t.Errorf("entries of %q join to %q", lines, got)
		}
		for _, entry := range entries {
			if strings.ContainsAny(entry, ",\n") {
				t.Errorf("entry %q of %q holds a separator", entry, lines)
			}
		}
		// Whatever the text is, what is appended to it comes first.
		for _, appended := range [][]string{
			append(slices.Clone(lines), "203.0.113.7"),
			append(slices.Clone(lines[:len(lines)-1]), lines[len(lines)-1]+",203.0.113.7"),
		} {
			if got := readAll(FromList(appended)); got[0] != "203.0.113.7" || !slices.Equal(got[1:], entries) {
				t.Errorf("entries of %q = %q, want those of %q behind the appended one", appended, got, lines)
			}
		}
	})
}

var sizes = []int{1 << 10, 16 << 10, 1 << 20}

// The time for each byte must not grow with the size.
func BenchmarkReadAll(b *testing.B) {
	for _, size := range sizes {
		for name, line := range hostileLines(size) {
			b.Run(fmt.Sprintf("%s/%dKB", strings.ReplaceAll(name, " ", "-"), size>>10), func(b *testing.B) {
				header := []string{line}
				b.SetBytes(int64(len(line)))
				b.ReportAllocs()
				for b.Loop() {
					r := FromForwarded(header)
					for entry, ok := r.Next(); ok; entry, ok = r.Next() {
						consume(entry)
					}
				}
			})
		}
	}
}

// The usual case: the rightmost entry of a long header, whose length does not
// matter.
func BenchmarkRightmost(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("%dKB", size>>10), func(b *testing.B) {
			header := []string{strings.Repeat("6.6.6.6, ", size/9) + "203.0.113.7"}
			b.ReportAllocs()
			for b.Loop() {
				r := FromList(header)
				entry, _ := r.Next()
				if _, ok := ParseAddr(entry); !ok {
					b.Fatal("the rightmost entry is an address")
				}
			}
		})
	}
}
