package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	cryptorand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// patience is how long an answer may take before a test gives up on it.
const patience = 30 * time.Second

// upstream is an application that tells what it was sent. On /slow it answers
// in two halves.
type upstream struct {
	addr     string
	requests atomic.Int64  // but for /slow
	goOn     chan struct{} // closed when the second half may come
}

// received is what it tells: each header with all its lines.
type received struct {
	Method string
	URI    string
	Header http.Header
}

func startUpstream(t *testing.T) *upstream {
	t.Helper()
	u := &upstream{goOn: make(chan struct{})}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			_, _ = io.WriteString(w, "first,")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-u.goOn:
				_, _ = io.WriteString(w, "second")
			case <-r.Context().Done():
			}
			return
		}
		u.requests.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		_ = json.NewEncoder(w).Encode(received{r.Method, r.RequestURI, r.Header})
	}))
	t.Cleanup(server.Close)
	u.addr = server.Listener.Addr().String()
	return u
}

// getSlowly gets the first half of /slow. What it returns gets the other half.
func (u *upstream) getSlowly(t *testing.T, via http.RoundTripper, url string) (finish func()) {
	t.Helper()
	response, err := via.RoundTrip(request(t, url+"/slow"))
	if err != nil {
		t.Fatal(err)
	}
	first := make([]byte, len("first,"))
	if _, err := io.ReadFull(response.Body, first); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		close(u.goOn)
		if rest := string(readAll(t, response)); rest != "second" {
			t.Errorf("a request that was in flight was answered with %q and %q", first, rest)
		}
	}
}

// answer is a response, read to its end.
type answer struct {
	status int
	proto  string
	header http.Header
	body   []byte
}

// received is what the upstream was sent for this answer.
func (a answer) received(t *testing.T) received {
	t.Helper()
	var r received
	if err := json.Unmarshal(a.body, &r); err != nil {
		t.Fatalf("status %d, not the upstream's answer: %s", a.status, a.body)
	}
	return r
}

// wantClient checks that the upstream was told this one client ("": none), and
// nothing that a caller forged.
func (a answer) wantClient(t *testing.T, client string) {
	t.Helper()
	header := a.received(t).Header
	var want []string
	if client != "" {
		want = []string{client}
	}
	if got := header["X-Forwarded-For"]; !slices.Equal(got, want) {
		t.Errorf("the upstream got X-Forwarded-For %q, want %q", got, want)
	}
	for name, values := range header {
		if name != "X-Forwarded-For" && strings.Contains(strings.Join(values, " "), forgedNet) {
			t.Errorf("the upstream got what the caller forged, %s: %q", name, values)
		}
	}
}

// wantDenied checks a denial by a limit whose budget grows by one in interval.
func (a answer) wantDenied(t *testing.T, interval time.Duration) {
	t.Helper()
	seconds, err := strconv.Atoi(a.header.Get("Retry-After"))
	if a.status != http.StatusTooManyRequests || err != nil || seconds < 1 || seconds > int(interval.Seconds()) {
		t.Errorf("status %d, Retry-After %q, want 429 and at most %v", a.status, a.header.Get("Retry-After"), interval)
	}
}

// forgedNet begins every address that forged headers name.
const forgedNet = "198.18."

// forged are header lines by which a caller claims to be somebody else, each
// time another one.
func forged(n int) []string {
	address := forgedNet + strconv.Itoa(n/256) + "." + strconv.Itoa(n%256)
	return []string{
		"X-Forwarded-For: " + address,
		"X-Forwarded-For: " + address + ", " + address,
		"Forwarded: for=" + address,
		"X-Real-IP: " + address,
		"X-Client-IP: " + address,
		"True-Client-IP: " + address,
		"CF-Connecting-IP: " + address,
		"X_Forwarded_For: " + address,
	}
}

// curl runs curl from a local address.
func curl(t *testing.T, from string, url string, headers []string, options ...string) answer {
	t.Helper()
	args := []string{"-q", "-sS", "-4", "-k", "-i", "--noproxy", "*", "--max-time", "30", "--interface", from}
	args = append(args, options...)
	for _, line := range headers {
		args = append(args, "-H", line)
	}
	var problems bytes.Buffer
	cmd := exec.Command(tool(t, "curl"), append(args, url)...)
	cmd.Stderr = &problems
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("curl %s: %v: %s", url, err, problems.String())
	}
	reader := textproto.NewReader(bufio.NewReader(bytes.NewReader(output)))
	status, err := reader.ReadLine()
	if err != nil {
		t.Fatalf("curl %s: %v", url, err)
	}
	header, err := reader.ReadMIMEHeader()
	if err != nil {
		t.Fatalf("curl %s: %v", url, err)
	}
	body, _ := io.ReadAll(reader.R)
	proto, rest, _ := strings.Cut(status, " ")
	code, _ := strconv.Atoi(rest[:3])
	return answer{code, proto, http.Header(header), body}
}

// clientFrom is an HTTP/1.1 client with a local address, which keeps its
// connections.
func clientFrom(t *testing.T, ip string) *http.Transport {
	transport := &http.Transport{
		DialContext:         dialFrom(ip),
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true},
		MaxIdleConnsPerHost: 100,
	}
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

// dialFrom makes connections from a local address.
func dialFrom(ip string) func(context.Context, string, string) (net.Conn, error) {
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	return func(ctx context.Context, _, addr string) (net.Conn, error) {
		return dialer.DialContext(ctx, "tcp4", addr)
	}
}

// connection2 is one HTTP/2 connection from a local address to
// https://localhost.
func connection2(t *testing.T, ip, addr string) *http2.ClientConn {
	t.Helper()
	plain, err := dialFrom(ip)(t.Context(), "", addr)
	if err != nil {
		t.Fatal(err)
	}
	secure := tls.Client(plain, &tls.Config{InsecureSkipVerify: true, ServerName: "localhost", NextProtos: []string{"h2"}})
	if err := secure.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn, err := (&http2.Transport{StrictMaxConcurrentStreams: true}).NewClientConn(secure)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// request makes a GET request with header lines.
func request(t *testing.T, url string, headers ...string) *http.Request {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range headers {
		name, value, _ := strings.Cut(line, ": ")
		r.Header.Add(name, value)
	}
	return r
}

// get sends a GET request with header lines.
func get(t *testing.T, via http.RoundTripper, url string, headers ...string) answer {
	t.Helper()
	return do(t, via, request(t, url, headers...))
}

func do(t *testing.T, via http.RoundTripper, r *http.Request) answer {
	t.Helper()
	response, err := via.RoundTrip(r)
	if err != nil {
		t.Fatalf("%s %s: %v", r.Method, r.URL, err)
	}
	return answer{response.StatusCode, response.Proto, response.Header, readAll(t, response)}
}

func readAll(t *testing.T, response *http.Response) []byte {
	t.Helper()
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// dialRaw opens a connection from a local address, for bytes as they are.
func dialRaw(t *testing.T, ip, addr string) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := dialFrom(ip)(t.Context(), "", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return conn, bufio.NewReader(conn)
}

// selfSigned makes a certificate for localhost and returns its two files.
func selfSigned(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), cryptorand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	cert, err := x509.CreateCertificate(cryptorand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	write(t, certFile, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})))
	write(t, keyFile, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})))
	return certFile, keyFile
}
