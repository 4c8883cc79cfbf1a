package redisstore

import (
	"bufio"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// A server that answers what no Redis would is a state, not the end of the
// process.
func TestServersThatDoNotKeepToTheProtocol(t *testing.T) {
	for _, row := range []struct{ reason, answer string }{
		{"a list of a negative length", "*-7\r\n"},
		{"a text of a negative length", "$-9\r\n"},
		{"a map without end", "%1000000000000000000\r\n"},
		{"a list without end", "*1000000000000\r\n"},
		{"a text without end", "$1000000000000\r\n"},
		{"a streamed text", "$?\r\n;99999999999999\r\n"},
		{"a length that is none", "*x\r\n"},
		{"more answers than questions", strings.Repeat("*5\r\n:1\r\n:0\r\n:0\r\n:1\r\n:0\r\n", 50)},
		{"lists in lists", strings.Repeat("*1\r\n", 100_000)},
		{"HTTP", "HTTP/1.1 400 Bad Request\r\n\r\n"},
		{"an empty line", "\r\n"},
		{"bytes", "\x00\xff\xfe\n"},
		{"a line without end", strings.Repeat("x", 3<<20)},
	} {
		t.Run(row.reason, func(t *testing.T) {
			store := &Store{Address: []string{serveAnswer(t, row.answer)}}
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			conn, err := store.dial(ctx)
			if err == nil {
				defer conn.Close()
				_, err = conn.Beat(ctx, edgelimit.Beat{Instance: "a", TTL: time.Second, Pepper: "b"})
			}
			var storeErr *edgelimit.StoreError
			if !errors.As(err, &storeErr) || storeErr.Kind != edgelimit.StoreNotRedis {
				t.Errorf("got %v", err)
			}
		})
	}
}

// serveAnswer answers HELLO as Redis does, and then everything by this.
func serveAnswer(t *testing.T, answer string) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				lines := bufio.NewScanner(conn)
				for lines.Scan() {
					switch line := lines.Text(); {
					case line == "HELLO":
						_, _ = conn.Write([]byte("%1\r\n+proto\r\n:3\r\n"))
					case line == "CLIENT":
						_, _ = conn.Write([]byte("+OK\r\n"))
					case strings.HasPrefix(line, "EVAL"):
						_, _ = conn.Write([]byte(answer))
					}
				}
			}()
		}
	}()
	return listener.Addr().String()
}

// However a stream is cut, what is whole in it is the same.
func FuzzFrames(f *testing.F) {
	for _, seed := range []string{
		"+OK\r\n", ":1\r\n", "$5\r\nhello\r\n", "$-1\r\n", "*2\r\n:1\r\n$1\r\na\r\n", "*0\r\n", "*-1\r\n", "%1\r\n+a\r\n*1\r\n:1\r\n",
		">2\r\n+message\r\n:1\r\n+OK\r\n", "~1\r\n#t\r\n", "_\r\n", ",1.5\r\n", "=7\r\ntxt:abc\r\n", "!3\r\nERR\r\n", "*1\r\n*1\r\n*1\r\n:1\r\n",
	} {
		f.Add([]byte(seed), uint8(1))
	}
	f.Fuzz(func(t *testing.T, stream []byte, cut uint8) {
		var once, often frames
		whole, err := once.feed(stream)
		var parts int64
		var partsErr error
		for rest := stream; len(rest) > 0 && partsErr == nil; {
			n := min(len(rest), int(cut)+1)
			var got int64
			got, partsErr = often.feed(rest[:n])
			parts += got
			rest = rest[n:]
		}
		if whole != parts || (err == nil) != (partsErr == nil) {
			t.Errorf("%q: %d and %v at once, %d and %v in parts of %d", stream, whole, err, parts, partsErr, cut)
		}
		if len(once.open) > maxDepth+1 || once.skip > maxText+2 {
			t.Errorf("%q: %d lists, %d bytes to skip", stream, len(once.open), once.skip)
		}
	})
}
