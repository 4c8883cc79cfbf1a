package edgelimit

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"
)

// How the command `probe` asks: over one connection, to one address, so that the
// honest answer is the same each time.

// probeExchange is a request and what came of it.
type probeExchange struct {
	Title    string       `json:"title"`
	Headers  []headerLine `json:"headers"`
	Preamble string       `json:"preamble,omitempty"`
	Status   int          `json:"status,omitempty"`
	Answer   *probeAnswer `json:"answer,omitempty"`
	Outcome  probeFate    `json:"outcome"`
	Believed string       `json:"believed,omitempty"` // the header that was
	Error    string       `json:"error,omitempty"`

	forgery  forgery
	resolved netip.Addr    // the zero Addr: unresolved, or no answer
	trouble  *probeTrouble // why there is no answer
}

// probeFate is what became of a forged request.
type probeFate string

const (
	fatePlain      probeFate = "plain"      // nothing was forged
	fateSame       probeFate = "same"       // as the plain one
	fateBelieved   probeFate = "believed"   // resolved to what was forged
	fateChanged    probeFate = "changed"    // resolved to something else
	fateUnresolved probeFate = "unresolved" // which the plain one was not
	fateRefused    probeFate = "refused"    // no probe saw it
	fateFailed     probeFate = "failed"     // no answer that tells anything
	fateNotSent    probeFate = "not sent"   // HTTP/2 has no way to say it
)

// probeTrouble is why a request got no answer of a probe.
type probeTrouble struct {
	kind troubleKind
	says string
}

type troubleKind uint8

const (
	troubleRefused  troubleKind = iota // by an answer, or the end of the connection
	troubleDenied                      // 403: perhaps by `unresolved deny`
	troubleLimited                     // 429
	troubleSilent                      // a timeout or an error of the server
	troubleRedirect                    // somewhere else
)

func (p *probeTrouble) Error() string { return p.says }

func troublef(kind troubleKind, format string, args ...any) *probeTrouble {
	return &probeTrouble{kind, fmt.Sprintf(format, args...)}
}

// probeSender sends the requests of a run.
type probeSender struct {
	target    *url.URL
	choice    protocolChoice
	insecure  bool
	timeout   time.Duration
	transport *http.Transport
	protocol  string // of the latest answer

	mu            sync.Mutex
	local, remote netip.AddrPort // of the first connection; later ones go to the same address
}

// protocolChoice is which HTTP is spoken.
type protocolChoice string

const (
	negotiatedHTTP protocolChoice = "what TLS negotiates"
	onlyHTTP1      protocolChoice = "HTTP/1.1"
	onlyHTTP2      protocolChoice = "HTTP/2"
)

func newProbeSender(target *url.URL, choice protocolChoice, insecure bool, timeout time.Duration) *probeSender {
	s := &probeSender{target: target, choice: choice, insecure: insecure, timeout: timeout}
	s.transport = s.newTransport()
	return s
}

func (s *probeSender) newTransport() *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(s.choice != onlyHTTP2)
	protocols.SetHTTP2(s.choice != onlyHTTP1)
	return &http.Transport{
		DialContext:        s.dial,
		TLSClientConfig:    &tls.Config{InsecureSkipVerify: s.insecure},
		Protocols:          protocols,
		DisableCompression: true,
		MaxConnsPerHost:    1,
	}
}

func (s *probeSender) close() { s.transport.CloseIdleConnections() }

// preambleKey carries a forgery's preamble to the dialer.
type preambleKey struct{}

func (s *probeSender) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if _, remote := s.ends(); remote.IsValid() {
		addr = remote.String()
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	s.setEnds(conn)
	if preamble, ok := ctx.Value(preambleKey{}).(string); ok {
		return &preambleConn{Conn: conn, preamble: preamble}, nil
	}
	return conn, nil
}

// preambleConn is a connection on which a preamble goes before all else, together
// with what is written first: an answer to the preamble alone would be taken for
// one to no request.
type preambleConn struct {
	net.Conn
	preamble string
}

func (c *preambleConn) Write(p []byte) (int, error) {
	before := len(c.preamble)
	if before == 0 {
		return c.Conn.Write(p)
	}
	n, err := c.Conn.Write(append([]byte(c.preamble), p...))
	c.preamble = ""
	return max(0, n-before), err
}

// ends are the two addresses of the first connection.
func (s *probeSender) ends() (local, remote netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.local, s.remote
}

func (s *probeSender) setEnds(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.remote.IsValid() {
		s.local, s.remote = addrPortOf(conn.LocalAddr()), addrPortOf(conn.RemoteAddr())
	}
}

func addrPortOf(addr net.Addr) netip.AddrPort {
	if tcp, ok := addr.(*net.TCPAddr); ok {
		addrPort := tcp.AddrPort()
		return netip.AddrPortFrom(addrPort.Addr().Unmap(), addrPort.Port())
	}
	return netip.AddrPort{}
}

// maxAnswer bounds what is read of an answer, in bytes.
const maxAnswer = 1 << 20

// send sends one request. What came of it is judged by others.
func (s *probeSender) send(ctx context.Context, f forgery) *probeExchange {
	e := &probeExchange{Title: f.title, Headers: append([]headerLine{}, f.lines...), Preamble: f.preamble, forgery: f}
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()

	transport := s.transport
	if f.preamble != "" {
		// a connection of its own, and what it begins with
		ctx = context.WithValue(ctx, preambleKey{}, f.preamble)
		transport = s.newTransport()
		defer transport.CloseIdleConnections()
	}
	header := http.Header{"Accept": {"application/json"}, "User-Agent": {"caddy-edge-limit-probe"}}
	for _, line := range f.lines {
		// not Add, which would spell the name its own way
		header[line.Name] = append(header[line.Name], line.Value)
	}
	request := &http.Request{
		Method: http.MethodGet, URL: s.target, Host: s.target.Host,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: header,
	}
	if user := s.target.User; user != nil {
		password, _ := user.Password()
		request.SetBasicAuth(user.Username(), password)
	}

	response, err := transport.RoundTrip(request.WithContext(ctx))
	if err != nil {
		e.trouble = s.troubleOf(err)
	} else {
		defer response.Body.Close()
		s.protocol = response.Proto
		e.Status = response.StatusCode
		var body []byte
		if body, err = io.ReadAll(io.LimitReader(response.Body, maxAnswer)); err != nil {
			e.trouble = s.troubleOf(err)
		} else {
			e.Answer, e.resolved, e.trouble = s.read(response, body)
		}
	}
	if e.trouble != nil {
		e.Error = e.trouble.says
	}
	return e
}

func (s *probeSender) noHTTP2() *probeTrouble {
	return troublef(troubleSilent, "%s does not speak HTTP/2", s.target.Host)
}

// read takes the probe's answer out of a response, or says why there is none.
func (s *probeSender) read(response *http.Response, body []byte) (*probeAnswer, netip.Addr, *probeTrouble) {
	mediaType, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type"))
	switch status := response.StatusCode; {
	case s.choice == onlyHTTP2 && response.ProtoMajor != 2: // a server that negotiates nothing
		return nil, netip.Addr{}, s.noHTTP2()
	case status == http.StatusOK:
	case status >= 300 && status < 400 && response.Header.Get("Location") != "":
		return nil, netip.Addr{}, s.redirected(response)
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable && response.Header.Get("Retry-After") != "":
		return nil, netip.Addr{}, troublef(troubleLimited,
			"a limit denied the request (status %d, Retry-After %s): take the probe's path out of the limits "+
				"(`@rest not path /client-ip`, `edge_limit @rest { ... }`), or say observe in them, and try again later",
			status, orNone(printable(response.Header.Get("Retry-After"), maxWord)))
	case status == http.StatusForbidden:
		return nil, netip.Addr{}, troublef(troubleDenied,
			"status 403: the request was denied before the probe; `unresolved deny` does so when the client is unresolved, as does access control")
	case status == http.StatusUnauthorized:
		return nil, netip.Addr{}, troublef(troubleRefused, "status 401: name and password are asked for; write them into the URL, as in https://name:password@host/")
	case status >= 500:
		return nil, netip.Addr{}, troublef(troubleSilent, "the server failed with status %d", status)
	case status == http.StatusBadRequest && s.target.Scheme == "http" && strings.Contains(string(body), "HTTPS"):
		return nil, netip.Addr{}, troublef(troubleRefused, "%s wants TLS: write https:// instead of http://", s.target.Host)
	default:
		return nil, netip.Addr{}, troublef(troubleRefused, "no probe is there: status %d%s; put `edge_limit_probe /client-ip` into the site, "+
			"behind edge_limit, and probe that URL", status, kindOf(mediaType))
	}

	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		return nil, netip.Addr{}, troublef(troubleRefused, "no probe is there: the answer%s is no JSON", kindOf(mediaType))
	}
	answer := new(probeAnswer)
	_, hasResolved := fields["resolved"]
	_, hasSource := fields["source"]
	_, hasHealthy := fields["healthy"]
	if err := json.Unmarshal(body, answer); err != nil || !hasResolved || !hasSource || !hasHealthy {
		return nil, netip.Addr{}, troublef(troubleRefused, "no probe is there: the answer is JSON of something else")
	}
	if answer.Resolved == nil {
		return answer, netip.Addr{}, nil
	}
	resolved, err := netip.ParseAddr(*answer.Resolved)
	if err != nil {
		return nil, netip.Addr{}, troublef(troubleRefused, "no probe is there: the answer says %s, which is no address", printable(*answer.Resolved, maxWord))
	}
	return answer, resolved.WithZone("").Unmap(), nil
}

// redirected says where a redirect leads. It is not followed: forged requests
// go nowhere but where they were sent.
func (s *probeSender) redirected(response *http.Response) *probeTrouble {
	location, err := s.target.Parse(response.Header.Get("Location"))
	if err != nil {
		return troublef(troubleRedirect, "status %d redirects to no URL", response.StatusCode)
	}
	location.Fragment = ""
	to := printable(location.Redacted(), maxSentence)
	if location.String() == s.target.String() {
		return troublef(troubleRedirect, "status %d redirects to itself: %s", response.StatusCode, to)
	}
	return troublef(troubleRedirect, "status %d redirects to %s, and is not followed; if that is your site, probe that URL", response.StatusCode, to)
}

// troubleOf says what an error of the connection means.
func (s *probeSender) troubleOf(err error) *probeTrouble {
	var (
		verification *tls.CertificateVerificationError
		record       tls.RecordHeaderError
		lookup       *net.DNSError
		op           *net.OpError
		timeout      net.Error
	)
	at := s.target.Host
	switch {
	case errors.Is(err, context.Canceled):
		return troublef(troubleSilent, "interrupted")
	case errors.As(err, &lookup) && lookup.IsNotFound:
		return troublef(troubleSilent, "there is no host %s", printable(lookup.Name, maxWord))
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return troublef(troubleSilent, "%s did not answer within %v (--timeout allows more)", at, s.timeout)
	case errors.As(err, &verification):
		return troublef(troubleSilent, "the certificate of %s is not trusted: %v; if it is your own, add --insecure", at, printable(verification.Err.Error(), maxSentence))
	case s.choice == onlyHTTP2 && strings.Contains(err.Error(), "no application protocol"):
		return s.noHTTP2()
	case errors.As(err, &record), strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return troublef(troubleSilent, "%s does not speak TLS: if it speaks plain HTTP, write http:// instead of https://", at)
	case errors.As(err, &op) && op.Op == "dial":
		return troublef(troubleSilent, "nothing answers at %s: %v", at, op.Err)
	case strings.Contains(err.Error(), "malformed HTTP"):
		return troublef(troubleRefused, "%s does not speak HTTP: %s", at, printable(err.Error(), maxSentence))
	}
	detail := ": " + printable(err.Error(), maxSentence)
	if errors.Is(err, io.EOF) || strings.Contains(detail, "readLoopPeekFail") {
		detail = "" // net/http's own words for the same
	}
	return troublef(troubleRefused, "%s closed the connection without an answer%s", at, detail)
}

// How much of what others wrote is shown, in bytes.
const (
	maxWord     = 60
	maxSentence = 600
)

func kindOf(mediaType string) string {
	if mediaType == "" {
		return ""
	}
	return ", " + printable(mediaType, maxWord)
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}
